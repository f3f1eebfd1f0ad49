"""Every bound, with its reason: what the wire fixes is a constant, what a host may choose is in `Limits`."""

from __future__ import annotations

from dataclasses import dataclass

# Fixed by protocol v1: a frame beyond these is a breach, whoever sends it.
FRAME_BYTES_MAX = 4 << 20  # a Register of 32,768 planes (128 layers x 2 x 128 heads, one plane a head) is 1.3 MiB
AUX_BYTES_MAX = 64 << 10  # the first token, its logits' digest, sampler state; never KV
NAME_LENGTH_MAX = 128  # node, model and component names
HANDLE_BYTES_MAX = 256  # what names a GPU's memory to other processes: CUDA's own handle has 64
TEXT_LENGTH_MAX = 512  # a reason for a person
TRACEPARENT_LENGTH = 55  # of W3C Trace Context, version 00
ADDRESS_LENGTH_MAX = 256  # an endpoint or a socket's path
COMPONENTS_MAX = 16  # DeepSeek V4 has 7
PLANES_MAX = 32_768  # of one component, and of one Register within ARRAYS_MAX and VALUES_MAX
FIELDS_MAX = 64  # fields that one Reject names
FACTS_MAX = 64  # of one Identity: a model's sizes are some 25
WITHDRAWN_MAX = 64  # rooms that one Hello gives up: with their texts they stay within the shortest frame_bytes_max
PEERS_MAX = 256  # ranks that one room meets on the other side
TRANSPORTS_MAX = 8  # that a node may know
TOKENS_MAX = 1 << 24  # of one room: a context of 16 Mi tokens
PART_EXTENTS_MAX = 1 << 17  # of one part: 1 MiB of start, count pairs
PROMPT_BYTES_MAX = 2 << 20  # u32 token ids: 512 Ki tokens
TOKENS_BURST_MAX = 4_096  # token ids in one Tokens frame
TOP_LOGPROBS_MAX = 20  # alternatives of one generated token, as OpenAI's API has it: 640 KiB in one Tokens frame
LOGIT_BIASES_MAX = 1_024  # token ids whose logits one request changes: 8 KiB in its Begin
DIGEST_BYTES_MAX = 64  # SHA-512
TALLIES_MAX = 16  # kinds of which a daemon counts its rooms or sessions: a room has seven states
STEP_ORDERS_MAX = 32  # to an engine before one step: each may carry AUX_BYTES_MAX
ARRAYS_MAX = 1 << 16  # arrays in one frame: twice the planes; an empty one is 1 byte there and 64 in memory
VALUES_MAX = 1 << 19  # elements of all arrays in one frame: 32,768 planes of up to 15 fields
PLANE_BYTES_MIN = 8  # an array of more than PEERS_MAX elements holds planes: it cannot promise more than would fit

HOST_BUFFER_GIB = 1.0  # of decode's staging buffer by default: some 7,000 tokens of an 8B model, four pieces of a room
HOST_BUFFER_GIB_MIN, HOST_BUFFER_GIB_MAX = 1 / 1024, 1 << 14
WORKERS_MAX = 4_096  # of one router, those added at run time included: each is asked twice a second
ROUTERS_MAX = 64  # that one daemon knows
ENGINES_MAX = 256  # transport engines of one process: two ports and 3 to 9 threads each; a session has one at least
ENGINES_A_SESSION = 4  # at most: each has one thread that sends, or receives
ENDED_ROOMS_MAX = 8_192  # a router: what a late Begin must not revive; some seconds' worth at 5,000 rooms a second
AHEAD_MAX = 128  # peers of decode; beyond it only rooms bring more: a bus dials twice as many
API_KEYS_MAX = 4_096  # in the file of a router
UNUSABLE_MAX = 16  # prefill ranks in one Load that decode cannot use: each has a text for people
AHEAD_PING = 4  # prefill ranks that one Ping names to decode: each maps the arena then, and a fleet's not all at once
EARLIER_INCARNATIONS_MAX = 4  # of a peer, kept to drop late messages of dead processes
LOAD_MS = 20  # a Load that changes is sent this often at most
PREFIX_PLACED_BLOCKS_MAX = 1_024  # of one prompt that a router looks at: 64 Ki tokens take it 1 ms
RESUMPTIONS_MAX = 3  # of one answer: a prompt that breaks its workers meets no more of them
SERVER_ATTEMPTS_MAX = 3  # of one request that HTTP servers fail: a body that breaks them meets no more of them
CHOICES_MAX = 256  # rooms of one HTTP request, its prompts times n: each may carry a whole prompt
STOPS_MAX = 4  # stop strings of one HTTP request, as OpenAI's API has it
STOP_LENGTH_MAX = 1_024  # characters of one: the end of each answer is compared with all of them at every token
MESSAGES_MAX = 4_096  # messages of one chat, which a template renders one after the other
BODY_FIELDS_MAX = 256  # of one body that is passed on to HTTP servers: vLLM's chats have some 80
ECHO_BYTES_MAX = 1 << 20  # of all prompts in one answer, n times each: it is written as JSON in one piece
HTTP_BODY_BYTES_MAX = 8 << 20  # 512 Ki token ids as JSON
HTTP_BODIES_BYTES_MAX = 256 << 20  # of all bodies that are on their way at once
METRICS_LABELS_MAX = 16  # peers, or models, with series of their own in a histogram: 1,000 workers are scraped
HTTP_CONNECTIONS_MAX = 256  # with nothing asked on them; a router has as many more as it takes requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one node allows itself and its peers; every field has a reason and a unit."""

    window: int = 256  # unended grants a session: bounds the memory of ended numbers, and what one peer can hold
    rooms_max: int = 4_096  # rooms not yet ended in one node: bounds its memory
    prompts_bytes_max: int = 1 << 30  # prompts of these rooms, 4 bytes a token: rooms_max of 64 Ki tokens
    queue_max: int = 1_024  # rooms waiting for slots: beyond it the answer is 429, not a longer wait
    inflight_bytes_max: int = 64 << 30  # granted and not yet landed: bounds what a stall can strand
    sessions_max: int = 1_024  # of one node, ended ones that still await a fence included; as many peers at most
    peer_sessions_max: int = 4  # the same of one peer, so that none can use up the others'
    quarantine_fraction_max: float = 0.5  # of the arena that one silent peer may keep before it gets no more grants
    prefix_block_tokens: int = 64  # of a prompt that are shared or not: less finds more, and costs a digest each
    prefix_blocks_max: int = 65_536  # that decode remembers: 4 Mi tokens, some 30 MB of bookkeeping
    prefix_keys_max: int = 65_536  # blocks that a router remembers of each decode worker: as many as that keeps
    prefix_weight: int = 4  # free slots that count as much as one token of prefix; 0: a router places by load alone
    turn_tokens_max: int = 1_024  # of next turns that decode computes itself at a time: they delay its steps; 0: none
    hisparse_queue_max: int = 1_024  # HiSparse requests without a row, retracted ones included: beyond it, 429
    hisparse_wait_steps: int = 64  # the next in line waits for rows to come free by themselves before it takes one
    hisparse_quantum_steps: int = 256  # a request runs before it may be retracted: what its buffer cost is used first
    room_deadline_ms: int = 60_000  # a room that nobody ends ends here
    resend_ms: int = 200  # an unanswered request is repeated this often at first
    resend_ms_max: int = 2_000  # and this often at last
    ping_ms: int = 500  # how often a quiet peer is pinged
    slow_ms: int = 2_000  # after this much silence a peer gets nothing new, and with evidence of its death it is lost
    silence_ms: int = 10_000  # after this much it is lost in any case: processes of a busy host pause for seconds
    forget_ms: int = 600_000  # a dialled peer that was silent for this long and has nothing left to end is forgotten
    session_silence_ms: int = 30_000  # a decode node silent this long loses its sessions on the prefill side
    fence_poll_ms: int = 50  # how soon a fence that is not yet proven is looked at again, at first
    fence_poll_ms_max: int = 500  # and at last


# The least and the most that a limit may be, where these do not follow from its unit.
LIMIT_BOUNDS: dict[str, tuple[float, float]] = {
    "window": (1, 0xFFFF),  # travels as u16
    "inflight_bytes_max": (1 << 20, 1 << 50),
    "prompts_bytes_max": (PROMPT_BYTES_MAX, 1 << 50),
    "quarantine_fraction_max": (0.0, 1.0),
    "prefix_weight": (0, 1 << 20),
    "turn_tokens_max": (0, 1 << 20),
}
LIMIT_MILLISECONDS = (1, 86_400_000)
LIMIT_COUNT = (1, 1 << 20)
