"""Message structs of protocol v1: a frame is the array [version, kind, field...], fields in the order written here.

Within a version fields are only appended, each with a default, so that a decoder fills what is missing and ignores what
is extra. Times are remaining milliseconds; slots are little-endian u32. The comment beside a field is its meaning in
proto/v1, whose tables are generated from this module.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

from ..layout.layout import Components, Count16, Count32
from ..limits import (
    ADDRESS_LENGTH_MAX,
    AUX_BYTES_MAX,
    COMPONENTS_MAX,
    DIGEST_BYTES_MAX,
    FACTS_MAX,
    FIELDS_MAX,
    FRAME_BYTES_MAX,
    HANDLE_BYTES_MAX,
    LOGIT_BIASES_MAX,
    NAME_LENGTH_MAX,
    PART_EXTENTS_MAX,
    PEERS_MAX,
    PLANES_MAX,
    PROMPT_BYTES_MAX,
    STEP_ORDERS_MAX,
    TALLIES_MAX,
    TEXT_LENGTH_MAX,
    TOKENS_BURST_MAX,
    TOKENS_MAX,
    TOP_LOGPROBS_MAX,
    TRACEPARENT_LENGTH,
    TRANSPORTS_MAX,
    UNUSABLE_MAX,
    WITHDRAWN_MAX,
)

VERSION = 1

Id64 = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
Bytes64 = Annotated[int, Meta(ge=0, le=1 << 62)]
Milliseconds = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
TokenCount = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
GrantNumber = Annotated[int, Meta(ge=1, le=1 << 53)]  # dense from 1; exact in a double for those who log it as JSON
RankNumber = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]
Address = Annotated[str, Meta(max_length=ADDRESS_LENGTH_MAX)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=ADDRESS_LENGTH_MAX)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
RequestId = Annotated[str, Meta(max_length=NAME_LENGTH_MAX)]
TraceParent = Annotated[str, Meta(max_length=TRACEPARENT_LENGTH)]
Reason = Annotated[str, Meta(min_length=1, max_length=32)]
TransportName = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"\A[a-z0-9_-]+\Z")]


class _Wire(Struct, array_like=True, frozen=True, gc=False):
    """Fields in wire order; a field with a default was appended after v1.0 or is optional from the start."""

    kind: ClassVar[int]  # 24 to 31 are not kinds of version 1; those from 32 on are of the ranks of one worker alone


class Ranks(Struct, array_like=True, frozen=True):
    """A worker's ranks in its model's parallel groups; a group of one has rank 0 of size 1."""

    tp_rank: Count16 = 0  # in the tensor-parallel group
    tp_size: Annotated[int, Meta(ge=1, le=PEERS_MAX)] = 1  # ranks in that group
    pp_rank: Count16 = 0  # in the pipeline
    pp_size: Annotated[int, Meta(ge=1, le=PEERS_MAX)] = 1  # stages of the pipeline
    dp_rank: Count16 = 0  # which data-parallel replica it is
    dp_size: Annotated[int, Meta(ge=1, le=0xFFFF)] = 1  # replicas


class Holds(Struct, array_like=True, frozen=True):
    """What a rank holds of one component; where several ranks hold the same, each is another replica of it."""

    component: Name  # its name
    layer_first: Count16  # layers [layer_first, layer_end)
    layer_end: Count16  # beyond its last layer
    head_first: Count16  # heads [head_first, head_end) of each
    head_end: Count16  # beyond its last head
    replica: Count16 = 0  # which of the equal holders it is: replica r of n sends to decode ranks with tp_rank % n = r
    replicas: Annotated[int, Meta(ge=1, le=PEERS_MAX)] = 1  # how many there are


class Member(Struct, array_like=True, frozen=True):
    """One rank of a worker that is a group of them."""

    node: Name  # its name
    endpoint: Address  # where it is dialled; empty where nobody has to


class Fact(Struct, array_like=True, frozen=True):
    """One of the facts that `weights` is a digest of, or that help a person to tell two engines apart."""

    name: Name  # of the fact, such as block_size
    value: Text  # its value at this node


class Identity(Struct, array_like=True, frozen=True):
    """The identity of a node, as Hello and Welcome carry it."""

    node: Name  # its name, for people, and its identity where there are no keys
    role: Literal["prefill", "decode", "router"]  # what it does
    incarnation: Id64  # a random u64 of one process's life
    ranks: Ranks  # in the model's parallel groups
    model: Annotated[str, Meta(max_length=NAME_LENGTH_MAX)]  # the model's name; empty for a router
    weights: Digest  # digest of the weights; empty for a router
    window: Annotated[int, Meta(ge=1, le=0xFFFF)]  # unended grants a session that this node accepts
    frame_bytes_max: Annotated[int, Meta(ge=1 << 16, le=FRAME_BYTES_MAX)] = FRAME_BYTES_MAX  # the longest it takes
    # Prefill: what this rank holds, one entry a component; none: all that the model has.
    holds: Annotated[tuple[Holds, ...], Meta(max_length=COMPONENTS_MAX)] = ()
    # Of the rank that leads a worker: all its ranks, itself first; none: it is alone.
    group: Annotated[tuple[Member, ...], Meta(max_length=PEERS_MAX)] = ()
    transports: Annotated[tuple[TransportName, ...], Meta(max_length=TRANSPORTS_MAX)] = ("shm",)  # the ways it takes
    place: Address = ""  # boot id, network and mount namespace, user: where equal, shm reaches; empty: not said
    # Of a daemon: tokens of a prompt and its answer together, at most; 0: not said. Since v1.4.
    context_tokens: TokenCount = 0
    # What stands behind `weights`, by name: where these differ, the facts that differ are named. Since v1.5.
    facts: Annotated[tuple[Fact, ...], Meta(max_length=FACTS_MAX)] = ()


class Withdrawn(Struct, array_like=True, frozen=True):
    """A room that decode gives up before it has a session to grant it on."""

    room: Id64  # it fails at prefill, also if it is opened later
    detail: Text  # why, for a person


class Hello(_Wire, frozen=True):
    """Opens a connection with the versions that the dialler speaks; is repeated until Welcome or Reject."""

    kind = 1
    version_min: Count16  # the lowest version that the dialler speaks
    version_max: Count16  # the highest
    identity: Identity  # who dials
    # Decode: rooms that this prefill may have open, and that it will not get a Grant of. Since v1.5.
    withdrawn: Annotated[tuple[Withdrawn, ...], Meta(max_length=WITHDRAWN_MAX)] = ()


class Welcome(_Wire, frozen=True):
    """Answers Hello: the version that both will speak, and who the listener is."""

    kind = 2
    version: Count16  # the highest that both speak
    identity: Identity  # who was dialled


class Reject(_Wire, frozen=True):
    """Refuses a Hello (session 0) or a session; `fields` names each field that was wrong, with both values."""

    kind = 3
    session: Id64  # the session refused; 0: the Hello
    reason: Reason  # "unknown_session", a cause, or a newer peer's word
    fields: Annotated[tuple[Text, ...], Meta(max_length=FIELDS_MAX)]  # one line a field: its name and both values


class Reach(Struct, array_like=True, frozen=True):
    """How a writer reaches the arena: over shm a Unix socket that hands its descriptor to whoever shows the token."""

    transport: TransportName  # the way to write, one of those that both take: what the fields below mean is its own
    host: Address  # shm: boot id and network namespace; mooncake, nixl: host:port
    address: Address  # shm: the socket's path, "@name" if abstract; mooncake, nixl: ports of more engines there, "1,2"
    token: Annotated[bytes, Meta(max_length=32)]  # a secret for one hand-over
    base: Bytes64  # mooncake, nixl: the arena's address there
    arena_bytes: Bytes64  # the arena's length
    # Offsets [hbm_base, hbm_base + hbm_bytes) of HBM components are a GPU's memory. shm: this handle opens it, and who
    # can writes there; mooncake, since v1.8: u64, big-endian, its address there, as `base`. Empty: nobody can.
    hbm_handle: Annotated[bytes, Meta(max_length=HANDLE_BYTES_MAX)] = b""
    hbm_base: Bytes64 = 0  # the offset of HBM components that is the first byte of that memory
    hbm_bytes: Bytes64 = 0  # and how many bytes they have


class StagedLayout(Struct, array_like=True, frozen=True):
    """Where rows of an HBM component land in the arena: its layout, with other slots and bases."""

    slots: Annotated[int, Meta(ge=1, le=0xFFFF_FFFF)]  # in place of the component's
    bases: Annotated[bytes, Meta(max_length=8 * PLANES_MAX)]  # u64 arena offsets, one a plane, in their order


class Register(_Wire, frozen=True):
    """Opens a session: what this writer may write, and how; is repeated until Registered reports all bytes ready."""

    kind = 4
    session: Id64  # a random u64 that decode mints, never 0; every message down to Drained opens with it
    components: Components  # only this rank's planes; bases are arena offsets, but see `staging`
    reach: Reach  # how to write there
    enable_hisparse: bool = False  # what the decode rank can do; last of v1.0
    # HBM components have offsets of their own, and this is where rows of them land whose writer says hbm_direct false:
    # one entry for each, in their order. Empty: where `components` says, in the arena. Since v1.7.
    staging: Annotated[tuple[StagedLayout, ...], Meta(max_length=COMPONENTS_MAX)] = ()


class Registered(_Wire, frozen=True):
    """How many bytes of the arena the writer has ready, from offset 0; grants stay below."""

    kind = 5
    session: Id64  # Register's
    bytes_ready: Bytes64  # arena_bytes once all are
    hbm_direct: bool = False  # rows of HBM components go to the GPU's memory that Reach names, not to the arena


class Part(Struct, array_like=True, frozen=True):
    """One component's share of a grant: rows [first_row, first_row + rows) of the room, in this order of slots."""

    component: Annotated[int, Meta(ge=0, lt=COMPONENTS_MAX)]  # its index in Register
    first_row: Count32  # of the room
    rows: Count32  # the counts of all extents together
    extents: Annotated[bytes, Meta(max_length=8 * PART_EXTENTS_MAX)]  # u32 start, count pairs; no count is 0


class Grant(_Wire, frozen=True):
    """Leases slots to one room on this session; repeats until Granted or an end."""

    kind = 6
    session: Id64  # Register's
    grant: GrantNumber  # dense from 1 in its session
    room: Id64  # the router's random u64 of this hand-off
    tokens: TokenCount  # the room's total
    prefix: TokenCount  # tokens that decode already holds: their rows are in no part
    parts: Annotated[tuple[Part, ...], Meta(max_length=COMPONENTS_MAX)]  # none: this rank sends no rows
    send_aux: bool  # exactly one rank of a room sends it
    time_left_ms: Milliseconds  # after this the grant fails at prefill
    enable_hisparse: bool = False  # what this request wants; last of v1.0
    verify: bool = False  # Landed is to carry a checksum of what was written
    # The grant is for rows of tokens [prefix, stop) alone, and another follows where that is not all. Since v1.7.
    stop: TokenCount = TOKENS_MAX

    @property
    def last(self) -> bool:
        """True if no grant of this room follows on its session."""
        return self.stop >= self.tokens


class Granted(_Wire, frozen=True):
    """The grant is known; it will end as Landed, Failed or Drained."""

    kind = 7
    session: Id64  # Register's
    grant: GrantNumber  # Grant's


class Landed(_Wire, frozen=True):
    """Every byte of the grant is written: proof that writing has ended. Repeats until Released."""

    kind = 8
    session: Id64  # Register's
    grant: GrantNumber  # Grant's
    kv_bytes: Bytes64  # written for this grant
    aux: Annotated[bytes, Meta(max_length=AUX_BYTES_MAX)]  # what decode needs to go on: the first token and the like
    checksum: Digest = b""  # of the rows as they were read, where the Grant says verify


class Released(_Wire, frozen=True):
    """The end of this grant has arrived, whichever of Landed, Failed, Drained it was; says nothing of the slots."""

    kind = 9
    session: Id64  # Register's
    grant: GrantNumber  # the ended grant


class Failed(_Wire, frozen=True):
    """The grant failed. Quiescent: proof that writing has ended, repeats until Released. Else Drained follows."""

    kind = 10
    session: Id64  # Register's
    grant: GrantNumber  # Grant's
    reason: Reason  # a cause
    detail: Text  # for a person
    quiescent: bool  # true: no access of this grant is, or ever will be, in flight


class Abort(_Wire, frozen=True):
    """Stop writing for this grant, or refuse it forever; repeats until Drained, Landed or Failed(quiescent)."""

    kind = 11
    session: Id64  # Register's
    grant: GrantNumber  # its Grant need not have arrived, nor been sent
    room: Id64 = 0  # the Grant's; it fails at prefill, also if it is opened later; 0: not named
    detail: Text = ""  # why the room has ended at decode, for a person. Since v1.5.


class Drained(_Wire, frozen=True):
    """No access of this grant is, or ever will be, in flight. Repeats until Released."""

    kind = 12
    session: Id64  # Register's
    grant: GrantNumber  # the ended grant


class Sampling(Struct, array_like=True, frozen=True):
    """How decode picks tokens; temperature 0 is greedy."""

    max_tokens: TokenCount  # generated ones, prefill's first included
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0  # 0 is greedy
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0  # the nucleus's share; 1 is all
    seed: Id64 = 0  # equal seeds, equal picks
    ignore_eos: bool = False  # go on to max_tokens
    # From here on since v1.3. A daemon whose engine lacks one of them refuses a room that needs it.
    top_k: Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)] = 0  # only this many of the most likely tokens; 0: all
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0  # only tokens at least this likely, relative to the likeliest
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # taken from the logit of each generated token
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # the same, times how often it was generated
    # Divides the logits of tokens of the prompt and the answer, multiplies them where they are negative.
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    min_tokens: TokenCount = 0  # no end of sequence before this many
    logit_bias: Annotated[bytes, Meta(max_length=8 * LOGIT_BIASES_MAX)] = b""  # pairs of u32 id and f32 added to it
    logprobs: bool = False  # Tokens carries logprobs
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] = 0  # and those of this many alternatives
    # Since v1.4: this many ids at the end of the prompt were generated by earlier rooms of this request. They count as
    # generated for penalties, and for the index of a draw; max_tokens and min_tokens are of this room alone.
    generated: TokenCount = 0


class Begin(_Wire, frozen=True):
    """The router starts a room on one daemon; repeats until Begun or End."""

    kind = 13
    room: Id64  # a random u64; a retry is a new room
    prompt: Annotated[bytes, Meta(max_length=PROMPT_BYTES_MAX)]  # u32 token ids
    sampling: Sampling  # how tokens are picked
    # To decode: endpoints of the prefill ranks to dial. To prefill: the decode ranks that it is for, and no others, by
    # the public keys that they are dialled with, or without keys by their nodes' names.
    peers: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=PEERS_MAX)]
    time_left_ms: Milliseconds  # after this the room fails
    enable_hisparse: bool = False  # what this request wants
    salt: Digest = b""  # rooms of different salts share no cached prefix
    # Since v1.4, for logs and traces alone: no daemon acts on them.
    request_id: RequestId = ""  # the client's request; several rooms may be of one
    traceparent: TraceParent = ""  # the router's span of the request, as W3C Trace Context writes it; empty: none
    # To prefill, since v1.6: send Tokens of the first token as soon as it is picked. Decode's begin with it as well.
    first_token: bool = False
    # To decode, since v1.9: no prefill writes this room. Decode computes what it has not cached of the prompt itself,
    # this many tokens at most. It dials nobody: `peers` has its own endpoint. 0: the peers write it.
    rest_max: TokenCount = 0


class Begun(_Wire, frozen=True):
    """Begin has arrived; End will follow."""

    kind = 14
    room: Id64  # Begin's


class Tokens(_Wire, frozen=True):
    """Generated ids from `first` on; what is not acknowledged is sent again."""

    kind = 15
    room: Id64  # Begin's
    first: TokenCount  # index of the first id here; the room's first generated token is 0
    ids: Annotated[bytes, Meta(max_length=4 * TOKENS_BURST_MAX)]  # u32
    # Where Begin asks for it, of each id: its f32 logprob, then `top_logprobs` pairs of u32 id and f32 logprob, the
    # likeliest first. Of the model's logits, before temperature, penalties and bias. Else empty.
    logprobs: Annotated[bytes, Meta(max_length=(4 + 8 * TOP_LOGPROBS_MAX) * TOKENS_BURST_MAX)] = b""


class TokensAcked(_Wire, frozen=True):
    """Every generated id below `next` has arrived."""

    kind = 16
    room: Id64  # Begin's
    next: TokenCount  # index of the first id that has not


class End(_Wire, frozen=True):
    """The room has ended on this daemon, once; repeats until Ended."""

    kind = 17
    room: Id64  # Begin's
    reason: Reason  # "stop", "length", "done" (prefill), or a cause
    detail: Text  # for a person
    tokens: TokenCount  # generated: the router waits for all of them
    retry_ms: Milliseconds = 0  # reason "full": when to ask again
    kv_bytes: Bytes64 = 0  # prefill: written; decode: landed
    copy_us: Bytes64 = 0  # prefill: time that its copies took
    stamp_ns: Bytes64 = 0  # CLOCK_MONOTONIC of the last byte written (prefill), of READY (decode); 0: not known
    tokens_digest: Digest = b""  # of the generated ids
    logits_digest: Digest = b""  # of the logits that they were picked from
    kv_digest: Digest = b""  # of the KV by (position, plane)
    prefix: TokenCount = 0  # decode: tokens of the prompt that it held already, on each of its ranks
    # Since v1.4: times of the room by this daemon's clock alone; 0: not known.
    queue_us: Bytes64 = 0  # prefill: from Begin to the first step that computed it; decode: from Begin to its slots
    compute_us: Bytes64 = 0  # prefill: from there to the end of the last such step
    transfer_us: Bytes64 = 0  # prefill: from there to the last byte written, what computing did not hide
    admission_us: Bytes64 = 0  # decode: from READY to the first step
    # Names the clock of stamp_ns. Stamps are compared only where both clocks are named, and alike.
    clock: Digest = b""


class Ended(_Wire, frozen=True):
    """End has arrived."""

    kind = 18
    room: Id64  # End's


class Cancel(_Wire, frozen=True):
    """The router gives the room up; repeats until End."""

    kind = 19
    room: Id64  # Begin's
    reason: Reason  # a cause


class Unusable(Struct, array_like=True, frozen=True):
    """A prefill rank that a decode node cannot use now."""

    endpoint: Endpoint  # as it is dialled
    why: Text  # for people


class Load(_Wire, frozen=True):
    """What a daemon has and has left, sent to its routers when it changes and with every Pong."""

    kind = 20
    ready: bool  # takes rooms
    draining: bool  # shuts down: no new rooms
    rooms_running: Count32  # begun and not ended, the queued ones left out
    rooms_queued: Count32  # wait for slots
    slots_free: Bytes64  # of its pool or arena, in tokens
    slots_total: Bytes64  # of its pool or arena, in tokens
    slots_quarantined: Bytes64 = 0  # in tokens: their writer has not been proven quiet
    enable_hisparse: bool = False  # what this daemon can do
    sparse_slots_free: Bytes64 = 0  # for requests that want HiSparse, as slots_free is for others
    sparse_slots_total: Bytes64 = 0  # the same of slots_total; 0: they are one
    # Since v1.4: of the prefill ranks that a router named to decode. No room of such a pair can land.
    unusable: Annotated[tuple[Unusable, ...], Meta(max_length=UNUSABLE_MAX)] = ()
    # Decode, since v1.9: the most that a Begin may have in rest_max; 0: it computes no prompt.
    rest_max: TokenCount = 0


class Ping(_Wire, frozen=True):
    """Are you there, and still the one I know?"""

    kind = 21
    incarnation: Id64  # the asking process's own
    # A router's to decode: some of the prefill ranks that rooms may name, for sessions to be opened ahead; else none.
    peers: Annotated[tuple[Endpoint, ...], Meta(max_length=PEERS_MAX)] = ()


class Tally(Struct, array_like=True, frozen=True):
    """How many there are of one kind."""

    name: Reason  # the kind: a room's state, or a transport
    count: Count32  # how many


class WorkerFigures(Struct, array_like=True, frozen=True):
    """Figures of a daemon for people who watch it. Totals count from the start of its process."""

    uptime_ms: Bytes64  # since the process began, by its own clock
    rooms: Annotated[tuple[Tally, ...], Meta(max_length=TALLIES_MAX)] = ()  # that have not ended, by state
    sessions: Annotated[tuple[Tally, ...], Meta(max_length=TALLIES_MAX)] = ()  # with peers, by transport
    rooms_done: Bytes64 = 0  # ended as asked
    rooms_failed: Bytes64 = 0  # ended by a cause other than "aborted"
    tokens: Bytes64 = 0  # prefill: of prompts that have landed; decode: generated
    kv_bytes: Bytes64 = 0  # prefill: written; decode: landed; of rooms that have landed
    copy_us: Bytes64 = 0  # prefill: time that their copies took
    quarantined_bytes: Bytes64 = 0  # now: leased to writers that are not proven quiet
    prefix_queried_tokens: Bytes64 = 0  # of admitted prompts, looked for in the prefix cache
    prefix_hit_tokens: Bytes64 = 0  # of these, found
    hot_hits: Bytes64 = 0  # HiSparse: tokens that steps read and the device had
    hot_misses: Bytes64 = 0  # those that it had not
    swapped_bytes: Bytes64 = 0  # brought to the device for misses
    hisparse_running: Count32 = 0  # now: HiSparse requests that the device has
    hisparse_waiting: Count32 = 0  # now: those that have landed and wait for it
    rooms_cancelled: Bytes64 = 0  # ended because nobody wanted them any more


class Pong(_Wire, frozen=True):
    """Answers Ping with the answering process's own incarnation."""

    kind = 22
    incarnation: Id64  # the answering process's own
    # A daemon's to a router: one entry; else none.
    figures: Annotated[tuple[WorkerFigures, ...], Meta(max_length=1)] = ()


class Goodbye(_Wire, frozen=True):
    """This process ends its sessions in good order."""

    kind = 23
    incarnation: Id64  # the leaving process's own
    reason: Reason  # a cause


class Setting(Struct, array_like=True, frozen=True):
    """Something that must be the same on all ranks of a worker."""

    name: Name  # of the setting
    value: Text  # its value on this rank


class RankJoin(_Wire, frozen=True):
    """A rank joins the leader of its worker; answered by RankMeet once all have, or by Reject."""

    kind = 32
    ranks: Ranks  # the sender's
    node: Name  # its name
    settings: Annotated[tuple[Setting, ...], Meta(max_length=FIELDS_MAX)]  # must equal the leader's, one for one
    tensors: Address = ""  # where it takes the connections of other ranks, for tensors


class RankMeet(_Wire, frozen=True):
    """All ranks have joined: they connect to each other, for tensors."""

    kind = 33
    port: Count16  # of the leader's host, for the leader's tensors
    tensors: Annotated[tuple[Address, ...], Meta(max_length=PEERS_MAX)] = ()  # of the other ranks, from rank 1 on
    secret: Annotated[bytes, Meta(max_length=32)] = b""  # proves a rank to another where it connects


class RankBound(_Wire, frozen=True):
    """The rank's engine is warm and its node listens."""

    kind = 34
    endpoint: Address  # where peers dial this rank
    http: Address  # where its metrics are; empty: nowhere


class RankRoom(_Wire, frozen=True):
    """Open or expect this room, as the router has begun it."""

    kind = 35
    number: RankNumber  # dense from 1 in each direction of a connection between ranks
    local_id: Id64  # the leader's number of this room, used once; all ranks and engines of the worker go by it
    begin: Begin  # the router's; without prefill: with what the leader has not cached of the prompt in rest_max


class StepOrder(Struct, array_like=True, frozen=True):
    """One order to the engine."""

    order: Literal["compute", "generate", "drop", "free"]  # compute and free: prefill; generate: decode
    local_id: Id64  # the room
    aux: Annotated[bytes, Meta(max_length=AUX_BYTES_MAX)] = b""  # generate: Landed's


class StepOrders(_Wire, frozen=True):
    """Give the engine these orders, then step it once."""

    kind = 36
    number: RankNumber  # as RankRoom's
    orders: Annotated[tuple[StepOrder, ...], Meta(max_length=STEP_ORDERS_MAX)]  # in this order


class RankFailed(_Wire, frozen=True):
    """The room has failed: on this rank, or as the leader reports on another, or for good."""

    kind = 37
    number: RankNumber  # as RankRoom's
    local_id: Id64  # the room
    reason: Reason  # a cause
    detail: Text  # for a person
    retry_ms: Milliseconds = 0  # reason "full": when to ask again


class RankReload(_Wire, frozen=True):
    """Read the allow-list anew."""

    kind = 38
    number: RankNumber  # as RankRoom's


class RankReady(_Wire, frozen=True):
    """The room is in this rank's arena."""

    kind = 39
    number: RankNumber  # as RankRoom's
    local_id: Id64  # the room
    kv_bytes: Bytes64  # landed
    prefix: TokenCount  # tokens of the prompt that this rank held already


class RankLanded(_Wire, frozen=True):
    """All that this rank had to write of the room is written."""

    kind = 40
    number: RankNumber  # as RankRoom's
    local_id: Id64  # the room
    kv_bytes: Bytes64  # written
    copy_us: Bytes64  # time that its copies took
    stamp_ns: Bytes64  # CLOCK_MONOTONIC of the last byte written
    clock: Digest = b""  # as End's


class RankDrained(_Wire, frozen=True):
    """Nothing reads this rank's pages of the room any more."""

    kind = 41
    number: RankNumber  # as RankRoom's
    local_id: Id64  # the room


class RankPicked(_Wire, frozen=True):
    """The rank that ends a pipeline has picked the first token."""

    kind = 42
    number: RankNumber  # as RankRoom's
    local_id: Id64  # the room
    aux: Annotated[bytes, Meta(max_length=AUX_BYTES_MAX)]  # what decode needs to go on


Message: TypeAlias = (
    Hello | Welcome | Reject | Register | Registered | Grant | Granted | Landed | Released | Failed | Abort | Drained
    | Begin | Begun | Tokens | TokensAcked | End | Ended | Cancel | Load | Ping | Pong | Goodbye
    | RankJoin | RankMeet | RankBound | RankRoom | StepOrders | RankFailed | RankReload | RankReady | RankLanded
    | RankDrained | RankPicked
)  # fmt: skip

MESSAGES: dict[int, type[Message]] = {message.kind: message for message in get_args(Message)}
