"""A code generator needs nothing but schema.json: a Go package made from it alone agrees with every vector."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdtransfer.wire import decode, encode
from tests.serve.stranger import messages
from tests.serve.stranger.messages import ROOT, unhex
from tests.support.paths import REPO
from tools.proto_generator.__main__ import main

GO = shutil.which("go")
pytestmark = pytest.mark.skipif(GO is None, reason="no Go compiler here: apt-get install -y golang-go")


class GoPeer:
    """A program of the generated package and of a `main` that decodes and encodes what it is given."""

    def __init__(self, folder: Path) -> None:
        """Generates into a folder that holds schema.json and nothing else of this project, and compiles."""
        assert GO is not None
        proto, self._folder = folder / "proto", folder / "peer"
        proto.mkdir()
        shutil.copy(ROOT / "schema.json", proto)
        assert main(["--root", str(proto), "--go", str(self._folder / "pdtransfer")]) == 0
        shutil.copy(REPO / "tests" / "support" / "go_peer" / "main.go", self._folder)
        (self._folder / "go.mod").write_text("module peer\n\ngo 1.19\n")
        self._run([GO, "vet", "./..."])
        self.unformatted = self._run(["gofmt", "-l", "."])
        self._run([GO, "build", "-o", "peer", "."])

    def _run(self, command: list[str]) -> str:
        """Without a network: the package needs Go's own library alone."""
        environment = {
            **os.environ,
            "GOPROXY": "off",
            "GOFLAGS": "-mod=mod",
            "GOTOOLCHAIN": "local",
            "CGO_ENABLED": "0",
        }
        ran = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def read(self, frames: Sequence[bytes]) -> list[tuple[str, str]]:
        """Of each frame the message's name and the frame that the program makes of it, or "refused" and the field."""
        lines = "".join(f"{frame.hex()}\n" for frame in frames)
        ran = subprocess.run(
            [self._folder / "peer"], input=lines, capture_output=True, text=True, timeout=300, check=True
        )
        answers = [line.partition(" ") for line in ran.stdout.splitlines()]
        assert len(answers) == len(frames)
        return [(name, rest) for name, _, rest in answers]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> GoPeer:
    return GoPeer(tmp_path_factory.mktemp("go"))


def test_the_package_is_formatted_as_go_code_is(peer: GoPeer) -> None:
    assert peer.unformatted == ""


def test_a_go_peer_reads_every_valid_vector_and_writes_the_bytes_that_this_side_writes(peer: GoPeer) -> None:
    cases = messages.vectors("valid")
    frames = [unhex(case["frame"]) for case in cases]
    answers = peer.read(frames)
    same: set[str] = set()
    for case, frame, (name, written) in zip(cases, frames, answers, strict=True):
        assert name == case["message"], case["name"]
        assert written == encode(decode(frame)).hex(), case["name"]
        if written == frame.hex():
            same.add(name)
    # Other frames lack fields with a default, have some that nobody knows, or take more bytes than they need.
    assert same == {entry["name"] for entry in messages.MESSAGES.values()}, (
        "each has frames that come back as they were"
    )


def test_a_go_peer_refuses_every_invalid_frame_and_field_under_its_name(peer: GoPeer) -> None:
    cases = [case for case in messages.vectors("invalid") if case["stage"] in ("frame", "fields")]
    answers = peer.read([unhex(case["frame"]) for case in cases])
    for case, answer in zip(cases, answers, strict=True):
        assert answer == ("refused", case["field"]), case["name"]


def test_a_go_peer_takes_what_only_the_rules_of_the_text_forbid(peer: GoPeer) -> None:
    """A schema does not say them: the peer's own code must."""
    cases = [case for case in messages.vectors("invalid") if case["stage"] in ("rules", "content")]
    answers = peer.read([unhex(case["frame"]) for case in cases])
    assert cases
    assert {name for name, _ in answers} <= {"Begin", "Grant", "Register", "Tokens", "RankRoom"}
