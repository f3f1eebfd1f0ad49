"""The bus: messages to and from peers that are told apart by their keys, or on loopback by their Hello.

A listener's peers come in over one ROUTER; every endpoint that is dialled has a DEALER of its own. Nothing here waits:
what a full queue, a lost connection or a stranger makes impossible is dropped and counted, and the protocol repeats.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import zmq

from ..errors import ConfigError, RemoteProtocolError, WorldError
from ..limits import TEXT_LENGTH_MAX
from ..wire import Hello, Message, Reject, decode, encode
from .connections import BREACH, HELLO_FIRST, Connection, Connections, TurnedAwayError
from .dialled import SOCKETS, Dialled
from .keys import Address, AllowList, Endpoint, KeyPair, check_exposure
from .limits import BusLimits
from .sockets import NOBLOCK, NOBLOCK_MORE, Drain, Frames, open_socket, resolve
from .wires import Sweep, Wire
from .zap import DOMAIN, Authenticator


class Bus:
    """Carries messages between this node and its peers on the running event loop.

    `receive(peer, message)` gets every message of a peer; `refused(peer, error)` hears of breaches, by the peer's name
    where the connection owns one, else "unknown:address". A peer's name is the endpoint text that was dialled, or
    "key:NAME" of the allow-list, or without keys "node:NAME" of its Hello. Without keys only loopback is bound, unless
    `insecure` says otherwise.

    Counters for metrics: `sent`, `received` (handed to `receive`), `refused` (breaches and messages out of turn),
    `dropped` (sends that failed, messages of connections that are muted or gone), `strangers` (handshakes refused).
    """

    def __init__(
        self,
        *,
        node: str,
        keys: KeyPair | None,
        allowed: AllowList | None,
        receive: Callable[[str, Message], None],
        refused: Callable[[str, RemoteProtocolError], None],
        insecure: bool = False,
        limits: BusLimits | None = None,
    ) -> None:
        assert (keys is None) == (allowed is None), "keys and an allow-list come together"
        self.node, self._keys, self._allowed, self._insecure = node, keys, allowed, insecure
        self._receive, self._on_refused = receive, refused
        self._limits = limits or BusLimits()
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * SOCKETS * self._limits.dials_max + 8)
        self._zap = None if allowed is None else Authenticator(self._context, self._loop, allowed, self._limits)
        self._router: zmq.Socket[bytes] | None = None
        self._router_drain: Drain | None = None
        self._connections = Connections(self._limits)
        self._dialled: dict[str, Dialled] = {}
        self._met: set[str] = set()  # names on the allow-list that have said Hello, connected or not
        self._sweep: Sweep | None = None
        self._auditing = self._loop.call_later(self._limits.audit_ms / 1e3, self._audit)
        self.sent = self.received = self.refused = self.dropped = 0

    @property
    def strangers(self) -> int:
        """Handshakes refused because the key is not on the allow-list."""
        return 0 if self._zap is None else self._zap.refused

    async def bind(self, endpoint: str) -> str:
        """Listens on tcp://host:port; port 0 is any, first-last the first free one. Returns the endpoint as bound.

        Raises ConfigError for what can never be bound, WorldError for what cannot be now.
        """
        assert self._router is None, "a bus has one listener"
        address = Address.parse(endpoint)
        try:
            host = (await resolve(self._loop, address.host))[0]
        except OSError as error:
            raise ConfigError(f"endpoint {endpoint!r}: host: {address.host} does not resolve: {error}") from None
        wanted = address.at(host, address.port_first)
        check_exposure(wanted, named=f"bind {wanted}", keyed=self._keys is not None, insecure=self._insecure)
        router = open_socket(self._context, zmq.ROUTER, self._limits)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.IPV6, int(":" in host or host == "*"))
        if self._keys is not None:
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            router.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
            router.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
            router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            _bind_first_free(router, address, host, endpoint)
        except (ConfigError, WorldError):
            router.close()
            raise
        self._router = router
        frames = Frames(router, self._accepted, self._connections.count, routed=True)
        self._router_drain = Drain(self._loop, router, frames, self._limits)
        last = router.get(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        bound = last.decode().rstrip("\0")
        self._sweep = Sweep(Address.parse(bound).port_first)
        return bound

    def dial(self, endpoint: str) -> str:
        """Keeps a connection to `[KEY@]tcp://host:port` from now on; returns the peer's name, the same text.

        Idempotent. Raises ConfigError for an endpoint that is malformed, or not one that this node's keys may talk to;
        WorldError at the limit of dialled endpoints, unless one of them has never been reached: that is given up.
        """
        if endpoint in self._dialled:
            return endpoint
        key = Endpoint.parse(endpoint).server_key
        if self._allowed is None and key is not None:
            raise ConfigError(f"endpoint {endpoint!r}: key: this node has no keys of its own to talk to it with")
        if self._allowed is not None and key is None:
            raise ConfigError(f"endpoint {endpoint!r}: key: missing; with keys on, an endpoint is KEY@tcp://host:port")
        if self._allowed is not None and key is not None and self._allowed.name_of(key) is None:
            raise ConfigError(f"endpoint {endpoint!r}: key: not on the allow-list")
        if len(self._dialled) >= self._limits.dials_max and not self._give_one_up():
            raise WorldError(f"endpoint {endpoint!r}: {len(self._dialled)} are dialled already, which is the limit")
        self._dialled[endpoint] = Dialled(
            endpoint, self._answered, context=self._context, loop=self._loop, keys=self._keys, limits=self._limits
        )
        return endpoint

    def _give_one_up(self) -> bool:
        """Whoever names endpoints to us may name some where nobody is: they keep no place from others."""
        hopeless = next((name for name, each in self._dialled.items() if each.hopeless), None)
        if hopeless is not None:
            self.hang_up(hopeless)
        return hopeless is not None

    def send(self, peer: str, message: Message) -> bool:
        """Whether the message is on its way; messages to one peer stay in order. Never blocks, never raises for a peer.

        False: the peer is not connected or does not read. A Hello to a dialled peer is kept, to open every connection.
        """
        sent = False
        dialled = self._dialled.get(peer)
        route = self._connections.route_of(peer)
        if dialled is not None:
            frame = encode(message)
            if type(message) is Hello:
                dialled.hello = frame
            sent = dialled.send(frame)
        elif route is not None:
            sent = self._route(route, encode(message))
            if type(message) is Reject:
                self._connections.rejected(route, self._loop.time())
        if sent:
            self.sent += 1
        else:
            self.dropped += 1
        return sent

    def allow(self, allowed: AllowList) -> list[str]:
        """Takes another allow-list in place of the one that it has; returns the names of peers that it has cut off.

        Those are whose key is listed no more, or under another name or with other roles, connected or not: what they
        were promised is not over with a connection. Their connections end, and nothing that they have said is heard.
        One that has never said a word ends when it does.
        """
        assert self._zap is not None, "a bus without keys knows no allow-list"
        before, self._allowed, self._zap.allowed = self._allowed, allowed, allowed
        assert before is not None, "keys and an allow-list come together"
        expelled = self._connections.expel(lambda user: before.entry(user) == allowed.entry(user))
        for connection in expelled:
            if connection.wire is not None:
                connection.wire.end()
        changed = {f"key:{name}" for user, name in before.names.items() if before.entry(user) != allowed.entry(user)}
        gone = sorted(self._met & changed)
        self._met -= changed
        for endpoint, dialled in list(self._dialled.items()):
            if allowed.name_of(dialled.server_key or "") is None:
                self.hang_up(endpoint)
                gone.append(endpoint)
        return gone

    def hang_up(self, peer: str) -> None:
        """Ends with a peer: closes what was dialled; one who dialled us has to say Hello again. Idempotent."""
        dialled = self._dialled.pop(peer, None)
        if dialled is not None:
            dialled.close()
        route = self._connections.route_of(peer)
        if route is not None:
            self._connections.forget(route)

    async def close(self) -> None:
        """Ends all connections once last words have left, or linger_ms have passed. Idempotent."""
        self._auditing.cancel()
        for dialled in self._dialled.values():
            dialled.close()
        self._dialled.clear()
        self._connections = Connections(self._limits)
        if self._router is not None and self._router_drain is not None:
            self._router_drain.stop()
            self._router.close()
        self._router = self._router_drain = None
        if self._zap is not None:
            self._zap.close()
        await self._loop.run_in_executor(None, self._context.destroy, self._limits.linger_ms)

    def _accepted(self, route: bytes, frame: zmq.Frame) -> None:
        now = self._loop.time()
        user = "" if self._allowed is None else str(frame.get("User-Id"))
        if self._allowed is not None and self._allowed.name_of(user) is None:
            self.dropped += 1  # it was listed when it came
            if (wire := self._wire_of(frame)) is not None:
                wire.end()
            return
        connection = self._connections.find(route, user, now)
        if connection.wire is None:
            connection.wire = self._wire_of(frame)
        if connection.wire is not None:
            connection.wire.took(len(frame))
        if connection.departed:
            self.dropped += 1
            return
        if now < connection.muted_until:
            self.dropped += 1
            connection.ignored += 1
            if connection.ignored > self._limits.ignored_max:
                self._end(connection, "muted", f"{connection.ignored} messages came all the same", now)
            return
        try:
            message = _decode(frame)
            if type(message) is Hello:
                self._connections.introduce(connection, self._name(user, message), now)
                if self._allowed is not None:
                    self._met.add(connection.name)
            else:
                self._connections.check(connection)
        except RemoteProtocolError as error:
            self._refuse(connection, frame, error, now)
            return
        connection.heard = now
        self.received += 1
        self._receive(connection.name, message)

    def _wire_of(self, frame: zmq.Frame) -> Wire | None:
        return Wire.of(int(frame.get(zmq.SRCFD)), curve=self._keys is not None)

    def _audit(self) -> None:
        now = self._loop.time()
        self._auditing = self._loop.call_later(self._limits.audit_ms / 1e3, self._audit)
        known = self._connections.wires
        for connection in self._connections.swamped():
            assert connection.wire is not None
            self._end(connection, "unread", f"{connection.wire.unread_bytes} bytes wait to be read", now)
        if self._sweep is not None:
            for wire in self._sweep.swamped(known, unread_bytes_max=self._limits.unread_bytes_max):
                self.refused += 1
                self._on_refused("unknown:", RemoteProtocolError("frames", "the first message has no end"))
                wire.end()
        for dialled in self._dialled.values():
            if dialled.swamped:
                self.refused += 1
                self._on_refused(dialled.name, RemoteProtocolError("unread", "too much waits to be read"))
                dialled.redial()

    def _end(self, connection: Connection, field: str, text: str, now: float) -> None:
        """Who floods is hung up on, and its key gets no connection for a while."""
        self.refused += 1
        name = connection.name or "unknown:"
        if connection.wire is not None:
            connection.wire.end()
        self._connections.depart(connection.route)
        if self._zap is not None:
            self._zap.ban(connection.user, now + self._limits.banned_ms / 1e3)
        self._on_refused(name, RemoteProtocolError(field, text))

    def _answered(self, dialled: Dialled, frame: zmq.Frame) -> None:
        now = self._loop.time()
        if now < dialled.muted_until:
            self.dropped += 1
            return
        try:
            message = _decode(frame)
        except RemoteProtocolError as error:
            dialled.muted_until = now + self._limits.mute_ms / 1e3
            self.refused += 1
            dialled.send(_reject(BREACH, error))
            self._on_refused(dialled.name, error)
            return
        if type(message) is Reject and message.reason == HELLO_FIRST and dialled.hello is not None:
            # The connection is a new one, and something overtook our Hello.
            dialled.send(dialled.hello)
            return
        self.received += 1
        self._receive(dialled.name, message)

    def peer_named(self, name: str) -> str:
        """Whom `receive` names so: who dialled, by its public key or its name on the allow-list; without keys by its
        node."""
        return f"node:{name}" if self._allowed is None else f"key:{self._allowed.name_of(name) or name}"

    def _name(self, user: str, hello: Hello) -> str:
        if self._allowed is not None:
            name = self._allowed.name_of(user)
            assert name is not None, "the authenticator lets no other key in"
            if not self._allowed.lets_be(user, hello.identity.role):
                text = f"{hello.identity.role!r}, the allow-list lets {name} be {sorted(self._allowed.roles[user])}"
                raise RemoteProtocolError("Hello.identity.role", text)
            return f"key:{name}"
        node = hello.identity.node
        if not node.isprintable():
            raise RemoteProtocolError("Hello.identity.node", f"{node!r} cannot be printed")
        return f"node:{node}"

    def _refuse(self, connection: Connection, frame: zmq.Frame, error: RemoteProtocolError, now: float) -> None:
        self.refused += 1
        until = now + self._limits.mute_ms / 1e3
        if isinstance(error, TurnedAwayError):
            # A Hello would mend it, so what follows is read all the same; but one Reject at a time says so.
            if now < connection.told_until:
                return
            reason, connection.told_until = error.reason, until
        else:
            reason = BREACH
            connection.mute(until)
        self._route(connection.route, _reject(reason, error))
        owner = connection.name and not connection.superseded
        self._on_refused(connection.name if owner else f"unknown:{frame.get('Peer-Address')}", error)

    def _route(self, route: bytes, frame: bytes) -> bool:
        if self._router is None or self._router_drain is None:
            return False
        self._router_drain.check()
        try:
            self._router.send(route, NOBLOCK_MORE)
            self._router.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._connections.depart(route)
            return False
        return True


def _decode(frame: zmq.Frame) -> Message:
    if frame.more:
        raise RemoteProtocolError("frames", "more than 1 in one message")
    return decode(frame.bytes)


def _reject(reason: str, error: RemoteProtocolError) -> bytes:
    return encode(Reject(session=0, reason=reason, fields=(str(error)[:TEXT_LENGTH_MAX],)))


def _bind_first_free(router: zmq.Socket[bytes], address: Address, host: str, endpoint: str) -> None:
    for port in range(address.port_first, address.port_last + 1):
        try:
            router.bind(address.at(host, port))
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise ConfigError(f"endpoint {endpoint!r}: host: no interface of this host has {host}") from None
            raise WorldError(f"cannot bind {endpoint}: {error.strerror}") from None
        return
    ports = "the port is" if address.port_first == address.port_last else "all ports are"
    raise WorldError(f"cannot bind {endpoint}: {ports} in use")
