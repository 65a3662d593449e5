"""What the cells of a channel's row and of a node's row hold: shared by the compiled code and the builder.

A channel is a ring of ``CAPACITY`` slots: a tag, a time and, of value streams, ``WIDTH`` float64 each. In a bounded
channel the capacity is the depth, and the time of a slot that was read is the time at which its writer learns so.
"""

from __future__ import annotations

# A channel's row.
HEAD, TAIL = 0, 1  # tokens read, tokens written, since the start
HEAD_SLOT, TAIL_SLOT = 2, 3
CAPACITY = 4
TAGS, TIMES, VALUES = 5, 6, 7  # addresses; VALUES is 0 where tokens carry none
WIDTH = 8  # float64 a value: 1, or block * block; 0 where tokens carry none
RESPONSE = 9  # cycles from a read until its writer knows; -1: the channel is unbounded
WRITER, READER = 10, 11  # addresses of nodes' rows
SEEN_HEAD, SEEN_TAIL = 12, 13  # as the scheduler last saw them
TRACE = 14  # address of a trace's row, or 0
CHANNEL_CELLS = 15

# A node's row.
KIND = 0
CLOCK = 1
WAITING, WAIT_CHANNEL = 2, 3  # why it stopped, and at which channel
STATE = 4  # of its state machine; 0 at the start
BUSY, ROOM, MEMORY = 5, 6, 7  # cycles: intervals, waits for room, waits for memory
START = 8  # clock at its first input; -1 before
FLOPS, READ, WRITTEN = 9, 10, 11  # operations on values; words read from and written to tensors
INS, OUTS, NINS, NOUTS = 12, 13, 14, 15  # addresses of lists of channels (0: a stream that nobody reads); lengths
INTERVAL, LATENCY = 16, 17  # of an element
PENDING, DONE_PENDING, BOX, BOX_VALUES = 18, 19, 20, 21  # actions put off, how many were made up for; their lists
QUEUED = 22
NODE_WIDTH = 23  # float64 a value; 0 where only times are wanted
SCRATCH = 24  # address of room for a value of its own
MEM = 25  # address of the memory's row
ASK_ADDRESS, ASK_WORDS, ASK_WRITE, REPLY = 26, 27, 28, 29  # a request, in words of 4 bytes, and when it was served
STORE = 30  # address of a growing array's row: a writer's
A, B, C, D, E, F, G, H = 31, 32, 33, 34, 35, 36, 37, 38  # constants and state of its kind: each kernel says which
P, Q, R, S, T, U, V, W = 39, 40, 41, 42, 43, 44, 45, 46
CONTROL = 47  # latency of stops, N and done
NOT_BEFORE = 48  # elements arrive then at the earliest: their data come from memory
FLIGHT, FLIGHTS = 49, 50  # times at which a client's last requests were served, a ring; how many there were
FIRST_WORD, SECOND_WORD = 51, 52  # where the arrays that it reads or writes start in memory
NODE_INDEX = 53
VALUE_WORDS = 54  # words of memory that a value takes
PLAIN = 55  # 1 where every output is read and no channel is shallow: stretches may be used
NODE_CELLS = 56

# The memory's row.
MODE, CHANNELS, COST, DELAY, LINE_WORDS = 0, 1, 2, 3, 4  # COST: of a transfer, in 1/256 cycles
FREE_FROM = 5  # address of the channels' times
OUTSTANDING, SETS, WAYS, HIT_DELAY = 6, 7, 8, 9
LINES, STAMPS, USES = 10, 11, 12  # of the scratchpad: addresses of its lines and of their last uses; uses so far
OFFSET, CYCLE, IN_CYCLE = 13, 14, 15  # of the simple model: the channel in turn
WAITERS, WAITING_COUNT = 16, 17  # address of the list of nodes that wait for it
TRANSFERS, HITS, LAST = 18, 19, 20  # counts; when the last transfer ends
MEMORY_CELLS = 21
SIMPLE, BURSTS = 1, 2

# Why a node stopped.
RUNNABLE, ON_INPUT, ON_ROOM, ON_MEMORY, ON_STORE, FINISHED, FAILED = 0, 1, 2, 3, 4, 5, 6

# Actions of a step that wait behind outputs without room.
RESERVE, EMIT, POP, ADVANCE = 0, 1, 2, 3
ACTION_CELLS = 5  # what; port or cycles; tag or number of ports; latency; earliest arrival

# A growing array: of a writer, or of a trace.
USED, ROOM_FOR, DATA = 0, 1, 2
