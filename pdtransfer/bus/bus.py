"""The bus: exchanges messages with peers that are identified by key, or on loopback by the name in their Hello.

The peers of a listener share one ROUTER socket; every dialled endpoint has a DEALER socket of its own. A session over
shared memory may have a line beside them. What a peer has sent by its lines is received before what it sends by ZMQ
after that. Nothing here waits. A message that cannot be sent (full queue, lost connection) is
dropped and counted; the protocol repeats it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from ..errors import Cause, ConfigError, RemoteProtocolError, WorldError
from ..limits import TEXT_LENGTH_MAX
from ..threads import in_thread
from ..wire import Hello, Message, Reject, Welcome, decode, encode
from .connections import BREACH, HELLO_FIRST, Connection, Connections, TurnedAwayError
from .dialled import SOCKETS, Dialled, affordable_dials
from .gone import AbsentPeers, Gone
from .keys import Address, AllowList, Endpoint, KeyPair, is_loopback_host
from .limits import BusLimits
from .lines import Process, SessionLines
from .sockets import NOBLOCK, NOBLOCK_MORE, Drain, Frames, Sweep, TcpConnection, address_of_frame, open_socket

if TYPE_CHECKING:
    from .zap import Authenticator


class Bus:
    """Carries messages between this node and its peers on the running event loop.

    `receive(peer, message)` is called for every message of a peer, `refused(peer, error)` for every protocol breach.
    `refused` gets the peer's name where the connection owns one, else "unknown:address". A peer's name is the dialled
    endpoint, "key:NAME" with NAME from the allow-list, or without keys "node:NAME" with NAME from its Hello. Without
    keys, only loopback may be bound, unless `insecure` is set. A later process takes over a name; without `supersede`,
    only once the earlier connection is gone. `reached` gets a peer's name whenever it has connected, or goes on by
    another of its connections: its address may be another one. `gone` gets the kernel's evidence that a peer is gone,
    again and again while it stands, and None once it does not.

    With keys a peer is met in a role that the allow-list gives its key, else not at all. That is the role in the Hello
    of one that dials, or in which this node dials it. A Welcome in another role reaches `receive` as a Reject.

    Counters for metrics: `sent`, `received` (passed to `receive`), `refused` (breaches and messages out of turn),
    `dropped` (failed sends, and messages of muted or closed connections), `strangers` (refused handshakes).
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
        supersede: bool = True,
        reached: Callable[[str], None] = lambda _: None,
        gone: Callable[[str, Gone | None], None] = lambda _, __: None,
    ) -> None:
        assert (keys is None) == (allowed is None), "a bus has both keys and an allow-list, or neither"
        self.node, self._keys, self._allowed, self._insecure = node, keys, allowed, insecure
        self._receive, self._on_refused, self._reached, self._on_gone = receive, refused, reached, gone
        self._limits = limits or BusLimits()
        self._affordable_dials = affordable_dials()
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * SOCKETS * self._limits.dials_max + 8)
        self._context.socket(zmq.PAIR).close()  # starts ZMQ's threads: the first dial would hold the interpreter for it
        self._zap: Authenticator | None = None
        if allowed is not None:
            from .zap import Authenticator

            self._zap = Authenticator(self._context, self._loop, allowed, self._limits)
        self._router: zmq.Socket[bytes] | None = None
        self._router_drain: Drain | None = None
        self._connections = Connections(self._limits, supersede=supersede)
        self._absent = AbsentPeers(self._limits)
        self._gone: dict[str, Gone] = {}  # what was reported last
        self._dialled: dict[str, Dialled] = {}
        self._greeting: Connection | None = None  # whose Hello is being answered: the answer goes back where it came
        self._lines = SessionLines(self, lines_max=self._affordable_dials, limits=self._limits, loop=self._loop)
        self._known_names: set[str] = set()  # names on the allow-list that have sent a Hello, connected or not
        self._sweep: Sweep | None = None
        self._auditing = self._loop.call_later(self._limits.audit_ms / 1e3, self._audit)
        self.sent = self.received = self.refused = self.dropped = 0

    @property
    def strangers(self) -> int:
        """Handshakes refused because the key is not on the allow-list."""
        return 0 if self._zap is None else self._zap.refused

    @property
    def last_stranger(self) -> str:
        """The key and the address of the latest such handshake; empty for none."""
        return "" if self._zap is None else self._zap.last_refused

    async def bind(self, endpoint: str) -> str:
        """Listens on tcp://host:port; returns the bound endpoint. Raises as `reserve`."""
        from .listening import reserve

        listener = await reserve(endpoint, keyed=self._keys is not None, insecure=self._insecure)
        with listener:  # closed, unless ZMQ has taken its descriptor
            return self.listen(listener)

    def listen(self, listener: socket.socket) -> str:
        """Takes over a socket that `reserve` returned; returns its endpoint."""
        assert self._router is None, "a bus has one listener"
        from .listening import address_bound

        bound = address_bound(listener)
        router = open_socket(self._context, zmq.ROUTER, self._limits)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.IPV6, int(listener.family == socket.AF_INET6))
        if self._keys is not None:
            from .zap import DOMAIN

            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            router.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
            router.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
            router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.set(zmq.USE_FD, listener.detach())
        router.bind(bound)
        self._router = router
        frames = Frames(router, self._on_listener_frame, self._connections.count, routed=True)
        self._router_drain = Drain(self._loop, router, frames, self._limits)
        self._sweep = Sweep(Address.parse(bound).port_first)
        return bound

    def dial(self, endpoint: str, role: str) -> str:
        """Keeps a connection to the peer of this role at `[KEY@]tcp://host:port` from now on; returns the peer's name,
        which is the same text.

        Idempotent. Raises ConfigError for a malformed endpoint, or one that this node's keys do not allow. Raises
        WorldError at the limit of dialled endpoints, or of what the process's descriptors are enough for, unless one
        that was never reached can be evicted.
        """
        if (dialled := self._dialled.get(endpoint)) is not None:
            if dialled.role != role:
                raise ConfigError(f"endpoint {endpoint!r}: role: {role!r}, it is dialled as {dialled.role!r}")
            return endpoint
        key = Endpoint.parse(endpoint).server_key
        if self._allowed is None and key is not None:
            raise ConfigError(f"endpoint {endpoint!r}: key: this node has no key pair to authenticate with")
        if self._allowed is not None and key is None:
            raise ConfigError(f"endpoint {endpoint!r}: key: missing; with keys on, an endpoint is KEY@tcp://host:port")
        if self._allowed is not None and key is not None and (why := self._allowed.why_not(key, role)):
            raise ConfigError(f"endpoint {endpoint!r}: key: {why}")
        dials_max = min(self._limits.dials_max, self._affordable_dials)
        if len(self._dialled) >= dials_max and not self._evict_unreachable():
            raise WorldError(f"endpoint {endpoint!r}: {len(self._dialled)} are dialled already, which is the limit")
        self._dialled[endpoint] = Dialled(
            endpoint, role, self._on_dialled_frame, make_place=self._evict_unreachable, context=self._context,
            loop=self._loop, keys=self._keys, limits=self._limits, reached=self._reached,
        )  # fmt: skip
        return endpoint

    def trouble(self, endpoint: str) -> str:
        """Why a dialled endpoint is not connected; empty where it is connected, or not dialled."""
        dialled = self._dialled.get(endpoint)
        return "" if dialled is None or dialled.connected else dialled.last_error

    def behind(self, peer: str) -> bool:
        """True if messages of a dialled peer wait to be read by this node, which goes on reading them."""
        dialled = self._dialled.get(peer)
        return dialled is not None and dialled.behind

    def address_of(self, peer: str) -> str:
        """The address at the other end of the connection that a peer has now; empty for none."""
        if (dialled := self._dialled.get(peer)) is not None:
            return dialled.address
        connection = self._connections.named(peer)
        return "" if connection is None or connection.tcp is None else connection.tcp.address

    def may_be_one(self, first: str, second: str) -> bool:
        """True if two dialled endpoints lead to one process, if both report that they do. With keys both have its key.
        Without keys, on loopback, any user may listen and claim to be another: there both connections must end at one
        address, which the kernel vouches for. Beyond loopback an operator has insisted on trust."""
        dialled, other = self._dialled.get(first), self._dialled.get(second)
        if dialled is None or other is None or self._keys is not None or self._insecure:
            return dialled is not None and other is not None and dialled.server_key == other.server_key
        addresses = dialled.address, other.address
        if not all(addresses):
            return False
        if any(map(is_loopback_host, addresses)):
            return (dialled.address, dialled.port) == (other.address, other.port)
        return True

    def _evict_unreachable(self) -> bool:
        """Frees the place of an endpoint that was never reached: peers may name endpoints where nothing listens."""
        unreachable = next((name for name, dialled in self._dialled.items() if dialled.unreachable), None)
        if unreachable is not None:
            self.hang_up(unreachable)
        return unreachable is not None

    def send(self, peer: str, message: Message) -> bool:
        """Sends a message; returns whether it was queued. Messages to one peer stay in order on its line and by ZMQ:
        one by ZMQ may be received after a later one by the line. Never blocks or raises.

        Returns False where the peer is not connected or does not read. A Hello to a dialled peer is stored, and opens
        every later connection.
        """
        frame = encode(message)
        if self._lines.send(peer, message, frame):
            self.sent += 1
            return True
        if type(message) is Hello and (dialled := self._dialled.get(peer)) is not None:
            dialled.hello = frame
        sent = self.send_frame(peer, frame)
        if type(message) is Reject and (connection := self._connection_to(peer)) is not None:
            connection.charge(1, self._loop.time(), self._limits)
        return sent

    def send_frame(self, peer: str, frame: bytes) -> bool:
        """As LineOwner."""
        sent = False
        if (dialled := self._dialled.get(peer)) is not None:
            sent = dialled.send(frame)
        else:
            tried = None
            while not sent and (connection := self._connection_to(peer)) is not None and connection is not tried:
                tried, sent = connection, self._route(connection, frame)  # where it has ended, there may be another
        if sent:
            self.sent += 1
        else:
            self.dropped += 1
        return sent

    def attach(self, peer: str, session: int, socket: socket.socket, *, greeted: bool) -> None:
        """As SessionLines.attach. There are no more lines than endpoints may be dialled."""
        self._lines.attach(peer, session, socket, greeted=greeted, process=self._process_of(peer))

    def detach(self, session: int) -> None:
        """As SessionLines.detach."""
        self._lines.detach(session)

    def read_lines(self, peer: str | None = None) -> None:
        """Receives what this peer, or every peer, has sent by lines until now."""
        self._lines.read(None if peer is None else self._process_of(peer))

    def _process_of(self, peer: str) -> Process:
        """Whose lines are read with this peer's messages: a process that this node dials may have several names."""
        dialled = self._dialled.get(peer)
        return peer if dialled is None or dialled.incarnation is None else dialled.incarnation

    def allow(self, allowed: AllowList) -> list[str]:
        """Replaces the allow-list; returns the names of the peers that lost access.

        A peer that dialled this node loses access when its key is removed, renamed, or listed with other roles. One
        that this node dialled does when its key may not have that role any more. Peers that are not connected are
        returned too, since they may still hold grants. Connections of removed keys are closed, and their unread
        messages are dropped. A connection without a Hello is closed at its first message.
        """
        assert self._zap is not None, "a bus without keys has no allow-list"
        before, self._allowed, self._zap.allowed = self._allowed, allowed, allowed
        assert before is not None, "a bus has both keys and an allow-list, or neither"
        expelled = self._connections.expel(lambda user: before.entry(user) == allowed.entry(user))
        for connection in expelled:
            if connection.tcp is not None:
                connection.tcp.end()
        changed = {f"key:{name}" for user, name in before.names.items() if before.entry(user) != allowed.entry(user)}
        revoked = sorted(self._known_names & changed)
        self._known_names -= changed
        for endpoint, dialled in list(self._dialled.items()):
            if allowed.why_not(dialled.server_key or "", dialled.role):
                self.hang_up(endpoint)
                revoked.append(endpoint)
        for name in revoked:
            self._lines.end(name)
        return revoked

    def hang_up(self, peer: str) -> None:
        """Closes a dialled peer's connection; a peer that dialled this node must send Hello again. Its lines are closed
        too. Idempotent."""
        self._lines.end(peer)
        dialled = self._dialled.pop(peer, None)
        if dialled is not None:
            dialled.close()
        for connection in self._connections.all_of(peer):
            self._connections.forget(connection.route)

    async def close(self) -> None:
        """Closes all connections once queued messages have left, or after linger_ms. Idempotent."""
        self._auditing.cancel()
        self._lines.end()
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
        await in_thread(lambda: self._context.destroy(self._limits.linger_ms))

    def _on_listener_frame(self, route: bytes, frame: zmq.Frame) -> None:
        now = self._loop.time()
        user = "" if self._allowed is None else str(frame.get("User-Id"))
        if self._allowed is not None and user not in self._allowed.names:
            self.dropped += 1  # its key was removed after the handshake
            if (tcp := self._tcp_of(frame)) is not None:
                tcp.end()
            return
        connection = self._connections.find(route, user, now)
        if connection.tcp is None:
            connection.tcp = self._tcp_of(frame)
        if connection.tcp is not None:
            connection.tcp.count_frame(len(frame))
        if connection.departed:
            self.dropped += 1
            return
        if now < connection.muted_until:
            self.dropped += 1
            connection.ignored += 1
            ignored_max = self._limits.hostile_max if connection.hostile else self._limits.ignored_max
            if connection.ignored > ignored_max:
                text = f"{connection.ignored} messages came all the same"
                self._end(connection, "muted", text, now, ban=connection.hostile)
            return
        try:
            message = _decode(frame)
            if type(message) is Hello:
                connection.charge(self._limits.hello_cost, now, self._limits, hostile=True)
                self._connections.introduce(connection, self._name(user, message), message.identity.incarnation, now)
                self._absent.back(connection.name)
                if self._allowed is not None:
                    self._known_names.add(connection.name)
                self._reached(connection.name)
            elif self._connections.check(connection):
                self._reached(connection.name)
        except RemoteProtocolError as error:
            self._refuse(connection, frame, error, now)
            return
        connection.last_message_at = now
        self._greeting = connection if type(message) is Hello else None
        try:
            self._pass_on(connection.name, message)
        finally:
            self._greeting = None

    def _connection_to(self, peer: str) -> Connection | None:
        greeting = self._greeting
        return greeting if greeting is not None and greeting.name == peer else self._connections.named(peer)

    def _tcp_of(self, frame: zmq.Frame) -> TcpConnection | None:
        return TcpConnection.of_frame(frame, curve=self._keys is not None)

    def _audit(self) -> None:
        now = self._loop.time()
        self._auditing = self._loop.call_later(self._limits.audit_ms / 1e3, self._audit)
        cookies = self._connections.cookies
        for connection in self._connections.backlogged():
            assert connection.tcp is not None
            self._end(connection, "unread", f"{connection.tcp.unread_bytes} bytes wait to be read", now)
        if self._sweep is not None:
            for tcp in self._sweep.backlogged(cookies, unread_bytes_max=self._limits.unread_bytes_max):
                self.refused_message("unknown:", RemoteProtocolError("frames", "the first message has no end"))
                tcp.end()
        for dialled in self._dialled.values():
            if dialled.backlogged:
                self.refused_message(dialled.name, RemoteProtocolError("unread", "too much waits to be read"))
                dialled.redial()
        self._report_gone(now)

    def _report_gone(self, now: float) -> None:
        # A line that stands proves that its peer's process lives: the kernel ends those of a dead one, too.
        evidence = self._absent.check(self._connections.all_named, lambda name: bool(self._lines.of(name)), now)
        evidence |= {name: gone for name, dialled in self._dialled.items() if (gone := dialled.gone) is not None}
        withdrawn, self._gone = self._gone.keys() - evidence.keys(), evidence
        for name in withdrawn:
            self._on_gone(name, None)
        for name, gone in evidence.items():
            self.read_lines(name)
            self._on_gone(name, gone)

    def _end(self, connection: Connection, field: str, text: str, now: float, *, ban: bool = True) -> None:
        """Closes a connection that floods this node, and bans its key for a while. One that a killed process has left
        full is no reason to ban its successor."""
        name = connection.name or "unknown:"
        if connection.tcp is not None:
            connection.tcp.end()
        self._connections.depart(connection.route)
        if self._zap is not None and ban:
            self._zap.ban(connection.user, now + self._limits.banned_ms / 1e3)
        self.refused_message(name, RemoteProtocolError(field, text))

    def received_message(self, peer: str, message: Message) -> None:
        """As LineOwner."""
        self.received += 1
        self._receive(peer, message)

    def refused_message(self, peer: str, error: RemoteProtocolError) -> None:
        """As LineOwner."""
        self.refused += 1
        self._on_refused(peer, error)

    def _on_dialled_frame(self, dialled: Dialled, frame: zmq.Frame) -> None:
        now = self._loop.time()
        if now < dialled.muted_until:
            self.dropped += 1
            return
        try:
            message = _decode(frame)
        except RemoteProtocolError as error:
            dialled.muted_until = now + self._limits.mute_ms / 1e3
            dialled.send(_reject(BREACH, error))
            self.refused_message(dialled.name, error)
            return
        if type(message) is Reject and message.reason == HELLO_FIRST and dialled.hello is not None:
            # The connection is new, and another message overtook the Hello.
            dialled.send(dialled.hello)
            return
        if type(message) is Welcome and (role := message.identity.role) != dialled.role:
            # Its key may have the role in which it is dialled; in another one it is not met.
            self.refused += 1
            text = f"role: {dialled.name} has {role!r}, it is dialled as {dialled.role!r}"
            message = Reject(0, Cause.REFUSED.value, (text,))
        elif type(message) is Welcome and message.identity.incarnation != dialled.incarnation:
            self.read_lines(dialled.name)  # of the process that it replaces
            dialled.incarnation = message.identity.incarnation
        self._pass_on(dialled.name, message)

    def _pass_on(self, peer: str, message: Message) -> None:
        """A message of ZMQ: what its process had sent by a line before it comes first."""
        self.read_lines(peer)
        self.received_message(peer, message)

    def peer_name(self, name: str) -> str:
        """Returns the name that `receive` uses for a dialling peer, from its key, its listed name, or its node."""
        return f"node:{name}" if self._allowed is None else f"key:{self._allowed.names.get(name, name)}"

    def _name(self, user: str, hello: Hello) -> str:
        if self._allowed is not None:
            if why := self._allowed.why_not(user, hello.identity.role):
                raise RemoteProtocolError("Hello.identity.role", why)
            return self.peer_name(user)
        node = hello.identity.node
        if not node.isprintable():
            raise RemoteProtocolError("Hello.identity.node", f"{node!r} cannot be printed")
        return f"node:{node}"

    def _refuse(self, connection: Connection, frame: zmq.Frame, error: RemoteProtocolError, now: float) -> None:
        self.refused += 1
        until = now + self._limits.mute_ms / 1e3
        if isinstance(error, TurnedAwayError):
            # A Hello would fix it, so later messages are read, up to a number. At most one Reject a period is sent.
            connection.charge(1, now, self._limits)
            if now < connection.next_reject_at:
                return
            reason, connection.next_reject_at = error.reason, until
        else:
            reason = BREACH
            connection.mute(until, hostile=True)
        self._route(connection, _reject(reason, error))
        owner = connection.name and not connection.superseded
        self._on_refused(connection.name if owner else f"unknown:{address_of_frame(frame)}", error)

    def _route(self, connection: Connection, frame: bytes) -> bool:
        if self._router is None or self._router_drain is None:
            return False
        self._router_drain.check()
        try:
            self._router.send(connection.route, NOBLOCK_MORE)
            self._router.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            name = "" if connection.superseded else connection.name
            self._connections.depart(connection.route)
            if name and self._connections.named(name) is None:
                self._absent.end(name, self._loop.time())
            return False
        return True


def _decode(frame: zmq.Frame) -> Message:
    if frame.more:
        raise RemoteProtocolError("frames", "more than 1 in one message")
    return decode(frame.bytes)


def _reject(reason: str, error: RemoteProtocolError) -> bytes:
    return encode(Reject(session=0, reason=reason, fields=(str(error)[:TEXT_LENGTH_MAX],)))
