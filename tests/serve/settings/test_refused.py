"""What is refused before anything starts plays refused.txt: each command line has its whole line on standard error.

Variables stand before the command, as in a shell; those of `environment` are there for all steps of a scenario. What
`file` has is the file of prefill's settings.
"""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pdtransfer import environment
from pdtransfer.serve.commands import cli
from tests.support.scenarios import Player, plays


class Refused(Player):
    makes = "environment"

    def __init__(self) -> None:
        self._files = TemporaryDirectory()
        self._file = Path(self._files.name) / "pd.toml"
        super().__init__()

    def effects(self, verb: str, words: list[str]) -> list[str]:
        if verb == self.makes:
            self._variables = words
            return []
        words = [word.strip('"') for word in (verb, *words)]
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(StringIO()) as out,
            redirect_stderr(StringIO()) as err,
        ):
            for name in os.environ:
                if name.startswith(environment.PREFIX) or name in environment.LAUNCHER_VARIABLES:
                    patch.delenv(name)
            for module in ("worker.daemon", "router.process", "commands.demo"):  # of what is accepted after all
                patch.setattr(f"pdtransfer.serve.{module}.run", lambda _: 0)
            given = next(place for place, word in enumerate(words) if "=" not in word)
            for variable in (*self._variables, *words[:given]):
                patch.setenv(*variable.split("=", 1))
            if words[0] == "file":
                self._file.write_text(words[1].replace("\\n", "\n").replace("'", '"'))
                words = ["prefill", "--config", str(self._file)]
            status = cli.main(words[given:])
        line = err.getvalue().replace(str(self._file), "FILE")
        assert (status, out.getvalue(), line[:12], line.find("\n")) == (2, "", "pdtransfer: ", len(line) - 1)
        return [line[12:-1]]

    def state(self) -> dict[str, str]:
        return {}


test_refused = plays({Path(__file__).with_name("refused.txt"): Refused})
