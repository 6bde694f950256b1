"""The kernel with which a graph fetches its inputs, as text that every driver can assemble.

The driver assembles it, without a compiler or a library of kernels. `graphrt.cuda.ring.format` says
how a slot is laid out. Traps:

- The host writes a slot while the kernel reads others, so pinned memory is read by volatile loads:
  a cached line would be an older step's.
- Payload loads are issued before the header says whether they are needed: together with header and
  moves they take one trip over the bus, not two.
- The last block to finish writes the counter, which all blocks have read by then. After it comes
  the progress, by which the host knows that the slot is free.
- A slot with another step's number is not copied and not counted: the graph reads its old inputs.
"""

THREADS = 256
NAME = b"graphrt_fetch_inputs"

PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry graphrt_fetch_inputs(
    .param .u64 p_slots,     // address of slot 0, pinned
    .param .u64 p_slab,      // where the inputs go
    .param .u64 p_counter,   // on the device: u64 steps fetched, u32 blocks that are done
    .param .u64 p_control,   // pinned: u64 progress, u64 fault, u64 number found
    .param .u64 p_count,     // how many slots there are
    .param .u64 p_stride,    // bytes from one slot to the next
    .param .u64 p_payload,   // bytes from the start of a slot to its payload
    .param .u32 p_words,     // words of header and moves
    .param .u32 p_chunks     // 16-byte chunks of the whole payload
)
.maxntid 256, 1, 1
{
    .shared .align 16 .b64 head[256];
    .reg .pred p, q, whole, mine;
    .reg .b32 tid, gid, total, chunks, words, i, n, moves;
    .reg .b32 kind, period, size, off, rem, x, low, high;
    .reg .b32 a0, a1, a2, a3, b0, b1, b2, b3;
    .reg .b64 counter, count, slot, payload, slab, control, stepped, at, from, w, number, done, how;
    .reg .b64 dst, src, all, m, ctr, next, shared_at, wide;

    mov.u32 tid, %tid.x;
    mov.u32 gid, %ctaid.x;
    mad.lo.u32 gid, gid, 256, tid;
    mov.u32 total, %nctaid.x;
    shl.b32 total, total, 8;
    ld.param.u64 slot, [p_slots];
    ld.param.u64 slab, [p_slab];
    ld.param.u64 ctr, [p_counter];
    ld.param.u64 control, [p_control];
    ld.param.u64 count, [p_count];
    ld.param.u64 w, [p_stride];
    ld.param.u64 payload, [p_payload];
    ld.param.u32 words, [p_words];
    ld.param.u32 chunks, [p_chunks];

    ld.volatile.global.u64 counter, [ctr];
    rem.u64 at, counter, count;
    mad.lo.u64 slot, at, w, slot;
    add.u64 payload, payload, slot;

    setp.lt.u32 mine, gid, chunks;
    mul.wide.u32 from, gid, 16;
    add.u64 from, from, payload;
    @mine ld.volatile.global.v4.u32 {a0, a1, a2, a3}, [from];

    mov.u64 shared_at, head;
    setp.lt.u32 p, tid, words;
    mul.wide.u32 wide, tid, 8;
    add.u64 at, slot, wide;
    add.u64 shared_at, shared_at, wide;
    @p ld.volatile.global.u64 w, [at];
    @p st.shared.u64 [shared_at], w;
    bar.sync 0;

    ld.shared.u64 number, [head];
    ld.shared.u64 m, [head+8];
    setp.ne.u64 p, number, counter;
    @p bra FAULT;
    setp.lt.s64 whole, m, 0;
    cvt.u32.u64 moves, m;
    @!whole bra MOVES;

    // The payload in the order of the slab; the thread that stores a chunk fills what is padding
    // in it, so that nobody else's store comes in between.
    @!mine bra DONE;
    mov.u32 i, gid;
    bra STORE;
WHOLE_LOOP:
    add.u32 i, i, total;
    setp.ge.u32 p, i, chunks;
    @p bra DONE;
    mul.wide.u32 at, i, 16;
    add.u64 from, payload, at;
    ld.volatile.global.v4.u32 {a0, a1, a2, a3}, [from];
STORE:
    mul.wide.u32 at, i, 16;
    add.u64 dst, slab, at;
    st.global.v4.u32 [dst], {a0, a1, a2, a3};
    mov.u32 n, 0;
    mov.u64 shared_at, head;
NEXT_PAD:
    setp.ge.u32 p, n, moves;
    @p bra WHOLE_LOOP;
    add.u32 n, n, 1;
    ld.shared.u64 from, [shared_at+16];
    ld.shared.u64 src, [shared_at+24];
    ld.shared.u64 all, [shared_at+32];
    add.u64 shared_at, shared_at, 32;
    add.u64 done, from, all;
    max.u64 from, from, at;
    add.u64 wide, at, 16;
    min.u64 done, done, wide;
    setp.ge.u64 p, from, done;
    @p bra NEXT_PAD;
    or.b64 w, from, done;
    cvt.u32.u64 b0, w;
    and.b32 b0, b0, 3;
    setp.ne.u32 q, b0, 0;
    add.u64 from, from, slab;
    add.u64 done, done, slab;
    @q bra PAD_BY_ONE;
    cvt.u32.u64 low, src;
    shr.u64 w, src, 32;
    cvt.u32.u64 high, w;
PAD_BY_FOUR:
    cvt.u32.u64 b0, from;
    and.b32 b0, b0, 4;
    setp.eq.u32 q, b0, 0;
    selp.b32 b1, low, high, q;
    st.global.u32 [from], b1;
    add.u64 from, from, 4;
    setp.lt.u64 p, from, done;
    @p bra PAD_BY_FOUR;
    bra NEXT_PAD;
PAD_BY_ONE:
    cvt.u32.u64 b0, from;
    and.b32 b0, b0, 7;
    shl.b32 b0, b0, 3;
    shr.u64 w, src, b0;
    cvt.u32.u64 b1, w;
    st.global.u8 [from], b1;
    add.u64 from, from, 1;
    setp.lt.u64 p, from, done;
    @p bra PAD_BY_ONE;
    bra NEXT_PAD;

MOVES:
    mov.u32 n, 0;
    mov.u64 shared_at, head;
NEXT_MOVE:
    setp.ge.u32 p, n, moves;
    @p bra DONE;
    add.u32 n, n, 1;
    ld.shared.u64 dst, [shared_at+16];
    ld.shared.u64 src, [shared_at+24];
    ld.shared.u64 all, [shared_at+32];
    ld.shared.u64 how, [shared_at+40];
    add.u64 shared_at, shared_at, 32;
    add.u64 dst, dst, slab;
    cvt.u32.u64 size, all;
    cvt.u32.u64 kind, how;
    and.b32 kind, kind, 255;
    shr.u64 how, how, 8;
    cvt.u32.u64 period, how;
    setp.eq.u32 p, kind, 2;
    @p bra FILL;
    setp.eq.u32 p, kind, 1;
    @p add.u64 src, src, payload;

    // off % period is where a repeated row comes from; of a copy the period is its size.
    or.b64 m, dst, src;
    or.b64 m, m, all;
    cvt.u64.u32 w, period;
    or.b64 m, m, w;
    cvt.u32.u64 x, m;
    and.b32 b0, x, 15;
    setp.eq.u32 p, b0, 0;
    @p bra BY_SIXTEEN;
    and.b32 b0, x, 3;
    setp.eq.u32 p, b0, 0;
    @p bra BY_FOUR;

    mov.u32 off, gid;
BY_ONE:
    setp.ge.u32 p, off, size;
    @p bra NEXT_MOVE;
    rem.u32 rem, off, period;
    cvt.u64.u32 at, rem;
    add.u64 from, src, at;
    ld.volatile.global.u8 b0, [from];
    cvt.u64.u32 at, off;
    add.u64 at, dst, at;
    st.global.u8 [at], b0;
    add.u32 off, off, total;
    bra BY_ONE;

BY_FOUR:
    shl.b32 off, gid, 2;
    shl.b32 x, total, 2;
FOUR_LOOP:
    setp.ge.u32 p, off, size;
    @p bra NEXT_MOVE;
    rem.u32 rem, off, period;
    cvt.u64.u32 at, rem;
    add.u64 from, src, at;
    ld.volatile.global.u32 b0, [from];
    cvt.u64.u32 at, off;
    add.u64 at, dst, at;
    st.global.u32 [at], b0;
    add.u32 off, off, x;
    bra FOUR_LOOP;

BY_SIXTEEN:
    shl.b32 off, gid, 4;
    shl.b32 x, total, 4;
SIXTEEN_LOOP:
    setp.ge.u32 p, off, size;
    @p bra NEXT_MOVE;
    rem.u32 rem, off, period;
    cvt.u64.u32 at, rem;
    add.u64 from, src, at;
    ld.volatile.global.v4.u32 {b0, b1, b2, b3}, [from];
    cvt.u64.u32 at, off;
    add.u64 at, dst, at;
    st.global.v4.u32 [at], {b0, b1, b2, b3};
    add.u32 off, off, x;
    bra SIXTEEN_LOOP;

    // Byte k of the pattern goes to addresses that are k modulo 8.
FILL:
    cvt.u32.u64 low, src;
    shr.u64 w, src, 32;
    cvt.u32.u64 high, w;
    or.b64 m, dst, all;
    cvt.u32.u64 x, m;
    and.b32 b0, x, 3;
    setp.ne.u32 p, b0, 0;
    @p bra FILL_BY_ONE;
    shl.b32 off, gid, 2;
    shl.b32 x, total, 2;
FILL_LOOP:
    setp.ge.u32 p, off, size;
    @p bra NEXT_MOVE;
    cvt.u64.u32 at, off;
    add.u64 at, dst, at;
    cvt.u32.u64 b0, at;
    and.b32 b0, b0, 4;
    setp.eq.u32 q, b0, 0;
    selp.b32 b1, low, high, q;
    st.global.u32 [at], b1;
    add.u32 off, off, x;
    bra FILL_LOOP;

FILL_BY_ONE:
    mov.u32 off, gid;
FILL_ONE_LOOP:
    setp.ge.u32 p, off, size;
    @p bra NEXT_MOVE;
    cvt.u64.u32 at, off;
    add.u64 at, dst, at;
    cvt.u32.u64 b0, at;
    and.b32 b0, b0, 7;
    shl.b32 b0, b0, 3;
    shr.u64 w, src, b0;
    cvt.u32.u64 b1, w;
    st.global.u8 [at], b1;
    add.u32 off, off, total;
    bra FILL_ONE_LOOP;

DONE:
    bar.sync 0;
    setp.ne.u32 p, tid, 0;
    @p bra EXIT;
    membar.gl;
    atom.global.add.u32 b0, [ctr+8], 1;
    mov.u32 b1, %nctaid.x;
    sub.u32 b1, b1, 1;
    setp.ne.u32 p, b0, b1;
    @p bra EXIT;
    mov.u32 b0, 0;
    st.volatile.global.u32 [ctr+8], b0;
    add.u64 next, counter, 1;
    st.volatile.global.u64 [ctr], next;
    membar.sys;
    st.volatile.global.u64 [control], next;
    bra EXIT;

FAULT:
    setp.ne.u32 p, gid, 0;
    @p bra EXIT;
    add.u64 next, counter, 1;
    st.volatile.global.u64 [control+16], number;
    membar.sys;
    st.volatile.global.u64 [control+8], next;
EXIT:
    ret;
}
"""
