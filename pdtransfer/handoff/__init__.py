"""The core of a hand-off: how KV gets from a prefill engine's pool into a decode engine's arena, without I/O.

Theory of operation
-------------------
There are two cores, one a side: `decode.sessions.DecodeSessions` and `prefill.sessions.PrefillSessions`. A core opens
no socket, reads no clock and draws no random number. The caller, a shell, gives it messages, the time and reports, and
performs the effects that each call returns. The simulator of the tests and the nodes of `client/` drive the same code.

Terms, each with the usual one beside it:

    room      one KV transfer of one request, named by a random number that both sides got from the router
    session   one prefill rank's right to write one decode rank's arena, from Register to its fence
    grant     one room's place in a session: the slot indices that prefill may write (slot mapping, block table)
    lease     decode's side of a grant: these slots are not reused before a proof that no write on them is in flight
    arena     decode's KV cache memory, which its peers write one-sided (the pinned or registered receive buffer)
    window    how many grants of one session may be unended: the credits of flow control
    staging   a buffer in the arena for rows of HBM components whose writer does not reach the GPU; copied up from there
    piece     the rows of some tokens of a room, which one grant asks for where they go through the staging buffer
    cell      rows of some layers that prefill has computed and offers: a chunk of chunked prefill, or a layer of it
    fence     the kernel's proof that a writer's process can write no more: it ends every lease of a session at once

The loop
--------
Every call of a core is made on one thread, with `now` in seconds on a clock that never goes back and does not count
time in which the process did not run. All but simple properties return a list of effects. A shell is this loop:

    def run(effects):
        queue.extend(effects)
        if running: return                   # effects of effects come after these, one after the other
        while queue:
            perform(queue.popleft())         # may call the core again, and run with what that returns
        arm_timer(core.next_tick())          # None: nothing is due

    on a message of a peer:   run(core.receive(peer, message, now))
    when the timer fires:     first receive what has arrived already, then run(core.tick(now))
    when the kernel shows that a peer is gone:            run(core.gone(peer, evidence, now)), again while it stands
    when it does not any more:                            run(core.gone(peer, "", now))

Messages may be lost, late, repeated or out of order; `Send` may be dropped. The core repeats what is not answered, and
accepts every message more than once. What a peer has sent must be received before the lack of it counts, and before its
Goodbye.

Decode: calls, effects and what each is owed
--------------------------------------------
The engine calls `expect(RoomRequest)` for a room, `abort` to give it up, and `release` when it reads a READY room no
more.

    Send(peer, message)         pass it on, or drop it
    Dial(peer)                  keep a connection to this endpoint; else call undialled
    HangUp(peer)                close that connection
    Offer(peer, session)        prepare one hand-over of the arena, then call offered(Reach) or unoffered
    Fence(session)              revoke the hand-over; call fenced once it is proven that nobody can write through it
    Forget(session)             drop what the shell keeps of the session
    RoomLeased(room)            for the engine: its slots are leased
    Settle / StopSettling       verify landed rows, or copy them from the staging buffer to HBM; always call settled
                                in the end, also after a stop, once nothing is read or copied any more
    RoomReady / RoomFailed      for the engine: exactly one of them a room
    RoomDrained(room)           for the engine, if it chose the slots: it may reuse them
    SessionLost, PeerRefused    for people

A room waits for the names of its sources (where it named leaders only), then for a window slot at each. At last it
waits in one queue for slots of the arena. A room that waits for a peer is in no other room's way. Admission leases all
components or none, growth included. A grant goes to each source, Landed comes from each. After the last one, and after
Settle where that is due, the room is READY. `ready(bytes)` reports how much of the arena is backed: slots are leased
only below that.

A source that does not reach HBM gets several grants, one piece of the room after the other. The first has no rows, and
lands once the engine there has some. Each further one waits in one line for slots of the staging buffer. It takes a
quarter of it at most, and keeps the window slot of the one before. A peer has half of the buffer at most. So a room
holds none of it while it is not computed, and the line moves on, whatever each room's size.

Prefill: the same
-----------------
The engine calls `open` for a room, `push` for each cell, `finish` with the aux (first token), `abort` to give it up.

    Send(peer, message)         as above
    Map(session, reach)         map that arena; call mapped, again as more of it is ready, or unmappable
    Unmap(session)              release the mapping, and all that could write through it
    Write(...)                  write these rows to these slots; call wrote exactly once, with LANDED, FAILED or UNKNOWN
    StopWriting(session, grant) its writes may stop early; wrote is still owed for each
    FenceWriter(session)        a write's end is UNKNOWN: end what could still carry it, then call fenced
    RoomAsked(room)             for the engine: a grant, or a withdrawal, has come for a room that is not open
    RoomLeased(room, tokens)    for the engine: all grants are here, and what is pushed from now on leaves at once
    RoomLanded / RoomFailed     for the engine: exactly one of them a room
    RoomDrained(room)           for the engine, after either of these: it may reuse the room's pages

Where a cell meets a grant, the rows that both have become a Write. A grant lands when all its bytes are written and the
engine has finished the room; one that another follows, when the engine has offered rows for that. Cells are kept for
the grants that follow. Landed, Failed and Drained repeat until Released.

When memory may be reused
-------------------------
Never because time has passed. A slot of the arena has claims: its room's, one of each lease, one of each
Settle. A slot of the staging buffer has the same but the room's. It is free when the last claim has ended. A room fails
at once; its leases end later, each by itself:

    by proof    Landed, Failed(quiescent) or Drained of that grant: no write of it is in flight, or will be
    by fence    of its session: no process can write through that hand-over any more

Until then an aborted lease of a lost, condemned or unresponsive peer is in quarantine: counted, bounded, not granted.
So an Offer must be a hand-over that can be fenced by itself, and `fenced` must not be called because a process has
died. A child of it may hold the mapping. On the prefill side RoomDrained is the only permission. An UNKNOWN write stays
in flight until FenceWriter is answered.

Peers
-----
Decode dials, greets and pings; prefill answers. `peers.Peers` has the rules of both, and of routers and daemons: which
process a name stands for now (incarnations), when it is slow, when it is lost, who is refused. A slow peer is granted
nothing new; a lost one costs its rooms, and keeps its session until the fence. A breach of a peer, raised inside as
RemoteProtocolError, ends the session that it was about, and nobody else's. LocalProtocolError is the caller's mistake.
Every state is in a table of `states`; every bound is in `limits`; keys in `timers` name what is due.
"""
