/* The hand-off between router (R), prefill worker (P) and decode worker (D), as a model for spin.
 *
 * Request A has two attempts (ids 0 and 1), request B one (id 2, served by D alone). D has pages for one of the three,
 * so each of them wants the pages of the others. Up to FAULTS things go wrong, at any step. README.md says what is
 * abstracted away. State and message names are those of common/core/*.h; ./names compares them.
 *
 * Every event of a machine is one d_step, as in the C cores. A macro WRONG_* plants one fault of design; ./run knows
 * them all. The model has no cycle (-DCYCLES: every cycle is an accepted one) and no bad state in which nothing more
 * can happen (asserted by Watch), so whatever happens ends well, without any assumption about fairness.
 */
#ifndef FAULTS
#define FAULTS 2 /* how many things may go wrong in one run */
#endif
#ifndef AUDITS
#define AUDITS 0 /* how many audits are sent in one run */
#endif
#ifndef TOKENS
#define TOKENS 2 /* length of an answer */
#endif

mtype:request = { REQUEST_NONE, REQUEST_TOKENIZING, REQUEST_PLACING, REQUEST_ADMITTING, REQUEST_PREFILLING,
                  REQUEST_ASKING, REQUEST_STREAMING, REQUEST_ANSWERING }
mtype:prefill = { PREFILL_NONE, PREFILL_QUEUED, PREFILL_COMPUTING, PREFILL_SENT, PREFILL_LEAVING }
mtype:decode = { DECODE_NONE, DECODE_RESERVED, DECODE_RECEIVING, DECODE_RUNNING, DECODE_LEAVING }
mtype:message = { MESSAGE_ADMIT, MESSAGE_ADMITTED, MESSAGE_REJECTED, MESSAGE_PREFILL, MESSAGE_QUEUED, MESSAGE_BUSY,
                  MESSAGE_PREFILL_END, MESSAGE_OPEN, MESSAGE_ACCEPT, MESSAGE_REFUSE, MESSAGE_FIN, MESSAGE_COMMIT, MESSAGE_TOKENS,
                  MESSAGE_END, MESSAGE_ABORT, MESSAGE_ABORT_SLOT, MESSAGE_COMMITTED, MESSAGE_AUDIT, MESSAGE_UNKNOWN }

/* --- sessions -------------------------------------------------------------------------------------------------------
 * near = the end that opened it (R, R, P), far = the other. A broken session (not alive) swallows what is sent; what
 * was sent before may still be read, until the reader notices. Each end notices for itself, at any time. */
#define RD 0
#define RP 1
#define PD 2
bool alive[3] = true;
bool near[3] = true;
bool far[3] = true;

#define MAIL 7
chan rd = [MAIL] of { mtype:message, byte, byte }; /* kind, attempt, flag */
chan dr = [MAIL + 3] of { mtype:message, byte, byte };
chan rp = [MAIL] of { mtype:message, byte, byte };
chan pr = [MAIL] of { mtype:message, byte, byte };
chan pd = [MAIL] of { mtype:message, byte, byte };
chan dp = [MAIL] of { mtype:message, byte, byte };

/* flag of MESSAGE_END, MESSAGE_PREFILL_END */
#define FAIL 0
#define OK   1
/* flag of MESSAGE_ABORT: why */
#define PLAIN  0 /* the client left, or a clock of R passed */
#define UNLESS 1 /* unless committed */
#define OBEYED 2 /* because of what P says */

hidden mtype:message kind;
hidden byte id, flag;

inline post(queue, session, is_up, what, whose, why_) {
    if
    :: is_up && alive[session] ->
        assert(nfull(queue)); /* MAIL is large enough */
        queue!what, whose, why_
    :: else
    fi
}

inline drain(queue) {
    do
    :: len(queue) > 0 -> queue?kind, id, flag
    :: else -> break
    od;
    skip /* spin 6.5 cannot end a d_step with a loop */
}

/* --- processes ------------------------------------------------------------------------------------------------------
 */
#define RUNS   0
#define SILENT 1 /* stopped for good; its peers hear nothing */
#define MUTE   2 /* does nothing any more, but its peers still hear beats */
byte r_stop, p_stop, d_stop;
#define ANY_MUTE (r_stop == MUTE || p_stop == MUTE || d_stop == MUTE)

byte faults = FAULTS;
byte audits = AUDITS;
bool may_leave = true; /* the client of A */

/* --- R */
mtype:request rst[2] = REQUEST_TOKENIZING; /* A, B */
byte attempt = 0;                          /* of A */
bool is_busy[2];                           /* rejected: waits for room */
bool has_prefill;                          /* A's leg at P */
bool is_queued;                            /* and P has mentioned it */
bool is_local;                             /* A's attempt is asked for without P */
byte delivered[2];                         /* tokens of the answer */
bool answered[2];

/* --- P */
mtype:prefill pst[2] = PREFILL_NONE;
bool opened[2], accepted[2], p_step[2];

/* The chunk of an attempt. HANDED: a send of P reads P's pages; FLYING: P's buffer is free, the bytes are under way. */
#define NO_CHUNK 0
#define HANDED   1
#define HUNG     2 /* a send that does not end by itself */
#define FLYING   3
#define DAMAGED  4
byte chunk[2];

/* --- D */
mtype:decode dst[3] = DECODE_NONE;
#define FREE 3
byte owner = FREE; /* of D's pages */
bool armed[3], disarming[3]; /* the last of them stays false: B has no slot */
bool fin[2], covered[2];
byte next[3]; /* position of the token that the next step makes */
bool d_step_of[3];
#ifdef WRONG_NO_KEY
byte slots, slot[2]; /* index and generation start anew in every incarnation: the key is what differs */
#endif
#ifdef WRONG_FREE_ON_ACK
bool unacknowledged[2];
#endif

/* === D ==============================================================================================================
 */
#if defined(WRONG_FREE_EARLY)
#define D_OPERATIONS(a) d_step_of[a]
#elif defined(WRONG_FREE_IN_STEP)
#define D_OPERATIONS(a) armed[a]
#elif defined(WRONG_FREE_ON_ACK)
#define D_OPERATIONS(a) (d_step_of[a] || (a < 2 && (armed[a] || unacknowledged[a])))
#else
#define D_OPERATIONS(a) (d_step_of[a] || armed[a])
#endif
#define D_LIVE(a) (dst[a] != DECODE_NONE && dst[a] != DECODE_LEAVING)

/* Memory returns: only when decided and quiet. */
inline d_settle(a) {
    if
    :: dst[a] == DECODE_LEAVING && !D_OPERATIONS(a) ->
        dst[a] = DECODE_NONE;
        assert(owner == a); /* frees its own pages only */
        owner = FREE;
        next[a] = 0;
        if
        :: a < 2 -> fin[a] = false; covered[a] = false
        :: else
        fi
    :: else
    fi
}

/* The one place where an entry's outcome is decided. */
inline d_decide(a, outcome, is_told_p) {
    assert(D_LIVE(a)); /* one terminal */
    post(dr, RD, far[RD], MESSAGE_END, a, outcome);
    if
    :: dst[a] == DECODE_RECEIVING ->
        if
        :: is_told_p -> post(dp, PD, far[PD], MESSAGE_REFUSE, a, 0)
        :: else
        fi;
#ifdef WRONG_FREE_ON_ACK
        unacknowledged[a] = is_told_p;
#endif
        disarming[a] = true
    :: else
    fi;
    dst[a] = DECODE_LEAVING;
    d_settle(a)
}

inline d_run(a) {
    assert(owner == a); /* runs in its own pages */
    assert(a == 2 || is_local || covered[a]); /* commit needs coverage */
    dst[a] = DECODE_RUNNING;
    d_step_of[a] = true
}

inline d_try_commit(a) {
    if
#ifdef WRONG_NO_COVERAGE
    :: fin[a] ->
#else
    :: fin[a] && covered[a] ->
#endif
        post(dp, PD, far[PD], MESSAGE_COMMIT, a, 0);
        disarming[a] = true;
        d_run(a)
    :: else
    fi
}

inline d_admit(a) {
    assert(dst[a] == DECODE_NONE); /* one Admit */
    if
    :: owner == FREE ->
        owner = a;
        next[a] = flag;
        if
        :: a == 2 || is_local -> d_run(a)
        :: else ->
            dst[a] = DECODE_RESERVED;
#ifdef WRONG_NO_KEY
            slot[a] = slots;
            slots++
#endif
        fi;
        post(dr, RD, far[RD], MESSAGE_ADMITTED, a, 0)
    :: else -> post(dr, RD, far[RD], MESSAGE_REJECTED, a, 0)
    fi
}

inline d_abort(a) {
    if
    :: D_LIVE(a) ->
        if
        :: dst[a] == DECODE_RUNNING && flag == UNLESS -> post(dr, RD, far[RD], MESSAGE_COMMITTED, a, 0)
        :: else ->
            assert(dst[a] != DECODE_RUNNING || flag == PLAIN); /* no committed decode is killed on P's word */
            d_decide(a, FAIL, true)
        fi
    :: else ->
        if
        :: flag == UNLESS -> post(dr, RD, far[RD], MESSAGE_END, a, FAIL)
        :: else
        fi
    fi
}

inline d_router_mail() {
    rd?kind, id, flag;
    if
    :: kind == MESSAGE_ADMIT -> d_admit(id)
    :: kind == MESSAGE_ABORT -> d_abort(id)
    :: kind == MESSAGE_AUDIT ->
        if
        :: D_LIVE(id)
        :: else -> post(dr, RD, far[RD], MESSAGE_UNKNOWN, id, 0)
        fi
    :: kind == MESSAGE_UNKNOWN -> assert(!D_LIVE(id)) /* no audit mismatch */
    :: else -> assert(false) /* only messages of the protocol */
    fi
}

inline d_prefill_mail() {
    pd?kind, id, flag;
    if
    :: kind == MESSAGE_OPEN ->
        if
        :: dst[id] == DECODE_RESERVED ->
            dst[id] = DECODE_RECEIVING;
            armed[id] = true;
            post(dp, PD, far[PD], MESSAGE_ACCEPT, id, 0)
        :: else -> post(dp, PD, far[PD], MESSAGE_REFUSE, id, 0)
        fi
    :: kind == MESSAGE_FIN ->
        if
        :: dst[id] == DECODE_RECEIVING -> fin[id] = true; d_try_commit(id)
        :: dst[id] == DECODE_RUNNING -> post(dp, PD, far[PD], MESSAGE_COMMIT, id, 0)
        :: else -> post(dp, PD, far[PD], MESSAGE_REFUSE, id, 0)
        fi
    :: kind == MESSAGE_ABORT_SLOT ->
#ifdef WRONG_FREE_ON_ACK
        unacknowledged[id] = false;
        d_settle(id);
#endif
        if
        :: dst[id] == DECODE_RECEIVING -> d_decide(id, FAIL, false)
        :: else
        fi
    :: kind == MESSAGE_AUDIT ->
        if
        :: dst[id] == DECODE_RECEIVING || dst[id] == DECODE_RUNNING
        :: else -> post(dp, PD, far[PD], MESSAGE_UNKNOWN, id, 0)
        fi
#ifdef WRONG_AUDIT_RESERVED
    :: kind == MESSAGE_UNKNOWN -> assert(dst[id] != DECODE_RECEIVING && dst[id] != DECODE_RESERVED) /* no audit mismatch */
#else
    :: kind == MESSAGE_UNKNOWN -> assert(dst[id] != DECODE_RECEIVING) /* no audit mismatch */
#endif
    :: else -> assert(false) /* only messages of the protocol */
    fi
}

/* The session's end is the end of its entries, at D alone. */
inline d_ends_rd() {
    alive[RD] = false;
    far[RD] = false;
    drain(rd);
#ifndef WRONG_D_KEEPS_RD
    if :: D_LIVE(0) -> d_decide(0, FAIL, true) :: else fi;
    if :: D_LIVE(1) -> d_decide(1, FAIL, true) :: else fi;
    if :: D_LIVE(2) -> d_decide(2, FAIL, true) :: else fi
#endif
}

inline d_ends_pd() {
    alive[PD] = false;
    far[PD] = false;
    drain(pd);
#ifndef WRONG_D_KEEPS_PD
    if :: dst[0] == DECODE_RECEIVING -> d_decide(0, FAIL, true) :: else fi;
    if :: dst[1] == DECODE_RECEIVING -> d_decide(1, FAIL, true) :: else fi
#endif
}

inline d_step_done(a) {
    assert(owner == a); /* the engine wrote into pages of its own sequence */
    d_step_of[a] = false;
    if
    :: dst[a] == DECODE_LEAVING -> d_settle(a)
    :: dst[a] == DECODE_RUNNING ->
        post(dr, RD, far[RD], MESSAGE_TOKENS, a, next[a]);
        next[a]++;
        if
        :: next[a] == TOKENS -> d_decide(a, OK, false)
        :: else -> d_step_of[a] = true
        fi
    fi
}

/* D's link thread: a chunk is copied by D itself, into an armed slot only. */
#if defined(WRONG_PUT)
#define ACCEPTS(a) true
#elif defined(WRONG_NO_KEY)
#define ACCEPTS(a) (armed[a] || (armed[1 - a] && slot[1 - a] == slot[a]))
#else
#define ACCEPTS(a) armed[a]
#endif
inline d_chunk(a) {
    if
    :: !ACCEPTS(a) /* dropped */
    :: else ->
        if
        :: chunk[a] == DAMAGED ->
            if
            :: dst[a] == DECODE_RECEIVING -> d_decide(a, FAIL, true)
            :: else
            fi
        :: else ->
            assert(owner == a); /* no byte of one slot in another's page, nor in a free one */
            if
            :: dst[a] == DECODE_RECEIVING -> covered[a] = true; d_try_commit(a)
            :: else
            fi
        fi
    fi;
    chunk[a] = NO_CHUNK
}

inline d_crash() {
    alive[RD] = false; far[RD] = false; drain(rd);
    alive[PD] = false; far[PD] = false; drain(pd);
    dst[0] = DECODE_NONE; dst[1] = DECODE_NONE; dst[2] = DECODE_NONE;
    owner = FREE;
    armed[0] = false; armed[1] = false;
    disarming[0] = false; disarming[1] = false;
    fin[0] = false; fin[1] = false;
    covered[0] = false; covered[1] = false;
    d_step_of[0] = false; d_step_of[1] = false; d_step_of[2] = false;
    next[0] = 0; next[1] = 0; next[2] = 0;
#ifdef WRONG_NO_KEY
    slots = 0;
#endif
#ifdef WRONG_FREE_ON_ACK
    unacknowledged[0] = false; unacknowledged[1] = false;
#endif
    faults--
}

/* === P ==============================================================================================================
 */
#define P_LIVE(a) (pst[a] != PREFILL_NONE && pst[a] != PREFILL_LEAVING)
#define SENDING(a) (chunk[a] == HANDED || chunk[a] == HUNG)
#ifdef WRONG_P_FREES_IN_SEND
#define P_OPERATIONS(a) p_step[a]
#else
#define P_OPERATIONS(a) (p_step[a] || SENDING(a))
#endif

inline p_settle(a) {
    if
    :: pst[a] == PREFILL_LEAVING && !P_OPERATIONS(a) ->
        assert(!SENDING(a)); /* no send reads pages that are free */
        pst[a] = PREFILL_NONE;
        opened[a] = false;
        accepted[a] = false
    :: else
    fi
}

inline p_decide(a, outcome, is_told_d) {
    assert(P_LIVE(a)); /* one terminal */
    post(pr, RP, far[RP], MESSAGE_PREFILL_END, a, outcome);
    if
    :: outcome == FAIL && is_told_d && opened[a] -> post(pd, PD, near[PD], MESSAGE_ABORT_SLOT, a, 0)
    :: else
    fi;
    pst[a] = PREFILL_LEAVING;
    p_settle(a)
}

/* One step at a time. */
inline p_plan() {
    if
    :: !p_step[0] && !p_step[1] && pst[0] == PREFILL_QUEUED && accepted[0] ->
        pst[0] = PREFILL_COMPUTING; p_step[0] = true
    :: else ->
        if
        :: !p_step[0] && !p_step[1] && pst[1] == PREFILL_QUEUED && accepted[1] ->
            pst[1] = PREFILL_COMPUTING; p_step[1] = true
        :: else
        fi
    fi
}

inline p_open(a) {
    if
    :: pst[a] == PREFILL_QUEUED && !opened[a] && near[PD] ->
        opened[a] = true;
        post(pd, PD, near[PD], MESSAGE_OPEN, a, 0)
    :: else
    fi
}

inline p_router_mail() {
    rp?kind, id, flag;
    if
    :: kind == MESSAGE_PREFILL ->
        assert(pst[id] == PREFILL_NONE); /* one Prefill */
        pst[id] = PREFILL_QUEUED;
#if AUDITS
        post(pr, RP, far[RP], MESSAGE_QUEUED, id, 0); /* matters to audits only */
#endif
        p_open(id)
    :: kind == MESSAGE_ABORT ->
        if
        :: P_LIVE(id) -> p_decide(id, FAIL, true)
        :: else
        fi
    :: kind == MESSAGE_AUDIT ->
        if
        :: P_LIVE(id)
        :: else -> post(pr, RP, far[RP], MESSAGE_UNKNOWN, id, 0)
        fi
    :: kind == MESSAGE_UNKNOWN -> assert(!P_LIVE(id)) /* no audit mismatch */
    :: else -> assert(false) /* only messages of the protocol */
    fi
}

inline p_decode_mail() {
    dp?kind, id, flag;
    if
    :: kind == MESSAGE_ACCEPT ->
        if
        :: P_LIVE(id) ->
            assert(pst[id] == PREFILL_QUEUED && opened[id] && !accepted[id]); /* one Accept */
            accepted[id] = true;
            p_plan()
        :: else
        fi
    :: kind == MESSAGE_COMMIT ->
        if
        :: P_LIVE(id) ->
            assert(pst[id] == PREFILL_SENT); /* Commit after Fin */
            p_decide(id, OK, false)
        :: else
        fi
    :: kind == MESSAGE_REFUSE ->
        if
        :: P_LIVE(id) -> p_decide(id, FAIL, false)
        :: else
        fi;
#ifdef WRONG_FREE_ON_ACK
        post(pd, PD, near[PD], MESSAGE_ABORT_SLOT, id, 0)
#endif
    :: kind == MESSAGE_AUDIT ->
        if
        :: P_LIVE(id)
        :: else -> post(pd, PD, near[PD], MESSAGE_UNKNOWN, id, 0)
        fi
    :: kind == MESSAGE_UNKNOWN -> assert(!P_LIVE(id)) /* no audit mismatch */
    :: else -> assert(false) /* only messages of the protocol */
    fi
}

inline p_step_done(a) {
    p_step[a] = false;
    if
    :: pst[a] == PREFILL_COMPUTING ->
        chunk[a] = HANDED;
        post(pd, PD, near[PD], MESSAGE_FIN, a, 0);
        pst[a] = PREFILL_SENT
    :: else -> p_settle(a)
    fi;
    p_plan()
}

inline p_ends_rp() {
    alive[RP] = false;
    far[RP] = false;
    drain(rp);
#ifndef WRONG_P_KEEPS_RP
    if :: P_LIVE(0) -> p_decide(0, FAIL, true) :: else fi;
    if :: P_LIVE(1) -> p_decide(1, FAIL, true) :: else fi
#endif
}

/* Its endpoint closes: sends end; their bytes are lost or, where `left` says so, under way. */
inline p_ends_pd(left) {
    alive[PD] = false;
    near[PD] = false;
    drain(dp);
    if :: SENDING(0) -> chunk[0] = left :: else fi;
    if :: SENDING(1) -> chunk[1] = left :: else fi;
#ifndef WRONG_P_KEEPS_PD
    if :: P_LIVE(0) -> p_decide(0, FAIL, true) :: else fi;
    if :: P_LIVE(1) -> p_decide(1, FAIL, true) :: else fi;
#endif
    p_settle(0);
    p_settle(1)
}

inline p_crash(left) {
    alive[RP] = false; far[RP] = false; drain(rp);
    alive[PD] = false; near[PD] = false; drain(dp);
    if :: SENDING(0) -> chunk[0] = left :: else fi;
    if :: SENDING(1) -> chunk[1] = left :: else fi;
    pst[0] = PREFILL_NONE; pst[1] = PREFILL_NONE;
    opened[0] = false; opened[1] = false;
    accepted[0] = false; accepted[1] = false;
    p_step[0] = false; p_step[1] = false;
    faults--
}

/* === R ==============================================================================================================
 */
#define A 0
#define B 1
#define CURRENT(q) (2 * q + (1 - q) * attempt) /* its attempt's id */
#define R_LEG(q) (rst[q] == REQUEST_ADMITTING || rst[q] == REQUEST_PREFILLING || rst[q] == REQUEST_ASKING || \
                  rst[q] == REQUEST_STREAMING)
#define R_LIVE(q) (rst[q] != REQUEST_NONE && rst[q] != REQUEST_ANSWERING)

/* Fate sharing: whatever legs are left are told and let go. */
inline r_drop(q, has_decode, why) {
    if
    :: has_decode -> post(rd, RD, near[RD], MESSAGE_ABORT, CURRENT(q), why)
    :: else
    fi;
    if
    :: q == A && has_prefill ->
        post(rp, RP, near[RP], MESSAGE_ABORT, attempt, PLAIN);
        has_prefill = false
    :: else
    fi
}

inline r_answer(q, outcome, has_decode, why) {
    assert(R_LIVE(q) && !answered[q]);              /* one terminal */
    assert(outcome == FAIL || delivered[q] == TOKENS); /* no success without the whole answer */
    r_drop(q, has_decode, why);
    answered[q] = true;
    is_busy[q] = false;
    rst[q] = REQUEST_ANSWERING
}

inline r_retry(q, has_decode, why) {
    assert(faults < FAULTS); /* no attempt is lost without a fault */
    if
    :: delivered[q] == TOKENS -> r_answer(q, OK, has_decode, why) /* only its End was lost */
    :: else ->
        if
        :: q == A && attempt == 0 ->
            r_drop(q, has_decode, why);
            attempt = 1;
            is_local = false;
            rst[q] = REQUEST_PLACING
        :: else -> r_answer(q, FAIL, has_decode, why)
        fi
    fi
}

inline r_admit(q) {
    assert(delivered[q] < TOKENS); /* one accepted output */
    is_busy[q] = false;
    rst[q] = REQUEST_ADMITTING;
#ifdef WRONG_RESUME
    post(rd, RD, near[RD], MESSAGE_ADMIT, CURRENT(q), 0)
#else
    post(rd, RD, near[RD], MESSAGE_ADMIT, CURRENT(q), delivered[q]) /* resumes behind what was emitted */
#endif
}

/* The same slot again when a P was Busy: it was never opened. */
inline r_prefill() {
    if
    :: near[RP] ->
        has_prefill = true;
        is_queued = false;
        rst[A] = REQUEST_PREFILLING;
        post(rp, RP, near[RP], MESSAGE_PREFILL, attempt, 0)
    :: else -> r_retry(A, true, OBEYED) /* no P now: free D's pages */
    fi
}

/* The prefill leg is over without success: D alone knows whether that matters. */
inline r_prefill_lost() {
    has_prefill = false;
    if
    :: rst[A] == REQUEST_PREFILLING ->
#ifdef WRONG_OBEY
        r_retry(A, true, OBEYED)
#else
        post(rd, RD, near[RD], MESSAGE_ABORT, attempt, UNLESS);
        rst[A] = REQUEST_ASKING
#endif
    :: else
    fi
}

inline r_tokens(q) {
    assert(flag == delivered[q]); /* one accepted output */
    assert(rst[q] != REQUEST_ADMITTING); /* no token before Admitted */
    delivered[q]++;
    rst[q] = REQUEST_STREAMING
}

inline r_mail_of(q) {
    if
    :: kind == MESSAGE_ADMITTED ->
        assert(rst[q] == REQUEST_ADMITTING); /* one answer to Admit */
        if
        :: q == B || is_local -> rst[q] = REQUEST_STREAMING
        :: else -> r_prefill()
        fi
    :: kind == MESSAGE_REJECTED ->
        assert(rst[q] == REQUEST_ADMITTING); /* one answer to Admit */
        is_busy[q] = true;
        is_local = is_local && q == B;
        rst[q] = REQUEST_PLACING
    :: kind == MESSAGE_TOKENS -> r_tokens(q)
    :: kind == MESSAGE_END ->
        if
        :: flag == OK -> r_answer(q, OK, false, PLAIN)
        :: else -> r_retry(q, false, PLAIN)
        fi
    :: kind == MESSAGE_COMMITTED ->
        if
        :: rst[q] == REQUEST_ASKING -> rst[q] = REQUEST_STREAMING
        :: else
        fi
    :: kind == MESSAGE_UNKNOWN -> assert(false) /* no audit mismatch */
    :: else -> assert(false) /* only messages of the protocol */
    fi
}

inline r_decode_mail() {
    dr?kind, id, flag;
    if
    :: id == 2 && R_LEG(B) -> r_mail_of(B)
    :: id == attempt && R_LEG(A) && kind != MESSAGE_AUDIT -> r_mail_of(A)
#ifdef WRONG_SUPERSEDED
    :: id < attempt && kind == MESSAGE_TOKENS && R_LIVE(A) ->
        assert(flag == delivered[A]); /* one accepted output */
        delivered[A]++
#endif
    :: else ->
        if
        :: kind == MESSAGE_AUDIT && !(id == attempt && R_LEG(A)) ->
            post(rd, RD, near[RD], MESSAGE_UNKNOWN, id, 0)
        :: else /* superseded, or over */
        fi
    fi
}

inline r_prefill_mail() {
    pr?kind, id, flag;
    if
    :: kind == MESSAGE_AUDIT ->
        if
        :: id == attempt && has_prefill
        :: else -> post(rp, RP, near[RP], MESSAGE_UNKNOWN, id, 0)
        fi
    :: kind == MESSAGE_UNKNOWN -> assert(id != attempt || !has_prefill) /* no audit mismatch */
    :: kind == MESSAGE_PREFILL_END ->
        if
        :: id == attempt && has_prefill ->
            if
            :: flag == OK -> has_prefill = false
            :: else -> r_prefill_lost()
            fi
        :: else
        fi
    :: kind == MESSAGE_QUEUED -> is_queued = is_queued || (id == attempt && has_prefill)
    :: kind == MESSAGE_BUSY ->
        if
        :: id == attempt && has_prefill ->
            has_prefill = false;
            if
            :: rst[A] == REQUEST_PREFILLING -> r_prefill()
            :: else
            fi
        :: else
        fi
    :: else -> assert(false) /* only messages of the protocol */
    fi
}

inline r_ends_rd() {
    alive[RD] = false;
    near[RD] = false;
    drain(dr);
#ifndef WRONG_R_KEEPS_RD
    if :: R_LEG(A) -> r_retry(A, false, PLAIN) :: else fi;
    if :: R_LEG(B) -> r_retry(B, false, PLAIN) :: else fi
#endif
}

inline r_ends_rp() {
    alive[RP] = false;
    near[RP] = false;
    drain(pr);
#ifndef WRONG_R_KEEPS_RP
    if :: has_prefill -> r_prefill_lost() :: else fi
#endif
}

/* === clocks =========================================================================================================
 * A clock passes for nothing when nothing else can happen (QUIET), and at any other time for the price of a fault. */
#define R_RUNS (r_stop == RUNS)
#define P_RUNS (p_stop == RUNS)
#define D_RUNS (d_stop == RUNS)

#define MAIL_R_RD (R_RUNS && near[RD] && len(dr) > 0)
#define MAIL_D_RD (D_RUNS && far[RD] && len(rd) > 0)
#define MAIL_R_RP (R_RUNS && near[RP] && len(pr) > 0)
#define MAIL_P_RP (P_RUNS && far[RP] && len(rp) > 0)
#define MAIL_P_PD (P_RUNS && near[PD] && len(dp) > 0)
#define MAIL_D_PD (D_RUNS && far[PD] && len(pd) > 0)
#define CUT_R(k) (R_RUNS && near[k] && !alive[k])
#define CUT_P_RP (P_RUNS && far[RP] && !alive[RP])
#define CUT_P_PD (P_RUNS && near[PD] && !alive[PD])
#define CUT_D(k) (D_RUNS && far[k] && !alive[k])
#define DOWN_RD (R_RUNS && D_RUNS && !near[RD] && !far[RD])
#define DOWN_RP (R_RUNS && P_RUNS && !near[RP] && !far[RP])
#define DOWN_PD (P_RUNS && D_RUNS && !near[PD] && !far[PD])
#ifdef WRONG_BUSY_LOOP
#define MAY_ASK(q) true
#else
#define MAY_ASK(q) (!is_busy[q] || owner == FREE)
#endif
#define CAN_PLACE(q) (R_RUNS && rst[q] == REQUEST_PLACING && near[RD] && MAY_ASK(q))
#define CAN_PLACE_A (CAN_PLACE(A) && near[RP])
#define CAN_LAND(a) (D_RUNS && (chunk[a] == FLYING || chunk[a] == DAMAGED))

#define QUIET \
    (!MAIL_R_RD && !MAIL_D_RD && !MAIL_R_RP && !MAIL_P_RP && !MAIL_P_PD && !MAIL_D_PD && !CUT_R(RD) && !CUT_R(RP) && \
     !CUT_P_RP && !CUT_P_PD && !CUT_D(RD) && !CUT_D(PD) && !DOWN_RD && !DOWN_RP && !DOWN_PD && !CAN_PLACE_A && \
     !CAN_PLACE(B) && !(R_RUNS && (rst[A] == REQUEST_TOKENIZING || rst[B] == REQUEST_TOKENIZING)) && \
     !(P_RUNS && (p_step[0] || p_step[1] || chunk[0] == HANDED || chunk[1] == HANDED)) && \
     !(D_RUNS && (d_step_of[0] || d_step_of[1] || d_step_of[2] || disarming[0] || disarming[1])) && !CAN_LAND(0) && \
     !CAN_LAND(1))

#ifdef WRONG_NO_LEASE
#define LEASE(me, up, peer, k) false
#else
#define LEASE(me, up, peer, k) (me == RUNS && up && alive[k] && peer == SILENT)
#endif
#if defined(WRONG_NO_T_OPEN) || defined(WRONG_NO_CLOCK_RESERVED)
#define T_OPEN(a) false
#else
#define T_OPEN(a) (D_RUNS && dst[a] == DECODE_RESERVED)
#endif
#ifdef WRONG_NO_T_STALL_D
#define T_STALL_D(a) false
#else
#define T_STALL_D(a) (D_RUNS && dst[a] == DECODE_RECEIVING && fin[a])
#endif
#ifdef WRONG_NO_T_STALL_P
#define T_STALL_P false
#else
#define T_STALL_P (P_RUNS && near[PD] && (chunk[0] == HUNG || chunk[1] == HUNG))
#endif
#define T_ADMIT(q) (R_RUNS && (rst[q] == REQUEST_ADMITTING || rst[q] == REQUEST_ASKING))
#define T_PLACE(q) (R_RUNS && rst[q] == REQUEST_PLACING && !near[RD])
#define ALONE_A (CAN_PLACE(A) && !near[RP]) /* no prefill worker at all: D serves alone */
#define T_HANDSHAKE(a) (P_RUNS && pst[a] == PREFILL_QUEUED && !opened[a] && !near[PD])
/* The request's deadline. Where nobody is mute nothing may wait for it, so there it does not pass. */
#define DEADLINE_R(q) (R_RUNS && ANY_MUTE && R_LIVE(q))
#define DEADLINE_P(a) (P_RUNS && ANY_MUTE && P_LIVE(a))
#ifdef WRONG_NO_CLOCK_RESERVED
#define DEADLINE_D(a) (D_RUNS && ANY_MUTE && D_LIVE(a) && dst[a] != DECODE_RESERVED)
#else
#define DEADLINE_D(a) (D_RUNS && ANY_MUTE && D_LIVE(a))
#endif
#define CLOSES(q) (R_RUNS && rst[q] == REQUEST_ANSWERING)

#define CLOCKS \
    (LEASE(r_stop, near[RD], d_stop, RD) || LEASE(d_stop, far[RD], r_stop, RD) || \
     LEASE(r_stop, near[RP], p_stop, RP) || LEASE(p_stop, far[RP], r_stop, RP) || \
     LEASE(p_stop, near[PD], d_stop, PD) || LEASE(d_stop, far[PD], p_stop, PD) || T_OPEN(0) || T_OPEN(1) || \
     T_STALL_D(0) || T_STALL_D(1) || T_STALL_P || T_ADMIT(A) || T_ADMIT(B) || T_PLACE(A) || T_PLACE(B) || ALONE_A || \
     T_HANDSHAKE(0) || T_HANDSHAKE(1) || DEADLINE_R(A) || DEADLINE_R(B) || DEADLINE_P(0) || DEADLINE_P(1) || \
     DEADLINE_D(0) || DEADLINE_D(1) || CLOSES(A) || CLOSES(B))

#define EARLY (faults > 0)

active proctype Router() {
end:
    do
    :: d_step { MAIL_R_RD -> r_decode_mail() }
    :: d_step { MAIL_R_RP -> r_prefill_mail() }
    :: d_step { CUT_R(RD) -> r_ends_rd() }
    :: d_step { CUT_R(RP) -> r_ends_rp() }
    :: d_step { R_RUNS && rst[A] == REQUEST_TOKENIZING -> rst[A] = REQUEST_PLACING }
    :: d_step { R_RUNS && rst[B] == REQUEST_TOKENIZING -> rst[B] = REQUEST_PLACING }
    :: d_step { CAN_PLACE_A -> r_admit(A) }
    :: d_step { CAN_PLACE(B) -> r_admit(B) }
    :: d_step { R_RUNS && may_leave && R_LIVE(A) -> may_leave = false; r_answer(A, FAIL, R_LEG(A), PLAIN) }
    /* clocks */
    :: d_step { QUIET && LEASE(r_stop, near[RD], d_stop, RD) -> r_ends_rd() }
    :: d_step { QUIET && LEASE(r_stop, near[RP], p_stop, RP) -> r_ends_rp() }
    :: d_step { QUIET && T_ADMIT(A) -> r_retry(A, true, PLAIN) }
    :: d_step { QUIET && T_ADMIT(B) -> r_retry(B, true, PLAIN) }
    :: d_step { EARLY && T_ADMIT(A) -> faults--; r_retry(A, true, PLAIN) }
    :: d_step { QUIET && T_PLACE(A) -> r_answer(A, FAIL, false, PLAIN) }
    :: d_step { QUIET && T_PLACE(B) -> r_answer(B, FAIL, false, PLAIN) }
    :: d_step { QUIET && ALONE_A -> is_local = true; r_admit(A) }
    :: d_step { QUIET && DEADLINE_R(A) -> r_answer(A, FAIL, R_LEG(A), PLAIN) }
    :: d_step { QUIET && DEADLINE_R(B) -> r_answer(B, FAIL, R_LEG(B), PLAIN) }
    :: d_step { QUIET && CLOSES(A) -> rst[A] = REQUEST_NONE }
    :: d_step { QUIET && CLOSES(B) -> rst[B] = REQUEST_NONE }
#if AUDITS
#ifdef WRONG_AUDIT_UNQUEUED
#define R_LISTS has_prefill
#else
#define R_LISTS (has_prefill && is_queued)
#endif
    :: d_step { R_RUNS && audits > 0 && near[RD] && R_LEG(A) && rst[A] != REQUEST_ADMITTING ->
                audits--; post(rd, RD, near[RD], MESSAGE_AUDIT, attempt, 0) }
    :: d_step { R_RUNS && audits > 0 && near[RP] && R_LISTS ->
                audits--; post(rp, RP, near[RP], MESSAGE_AUDIT, attempt, 0) }
#endif
    od
}

#define PREFILL_EVENTS(a) \
    :: d_step { P_RUNS && p_step[a] -> p_step_done(a) } \
    :: d_step { P_RUNS && chunk[a] == HANDED -> chunk[a] = FLYING; p_settle(a) } \
    :: d_step { QUIET && T_HANDSHAKE(a) -> p_decide(a, FAIL, true) } \
    :: d_step { QUIET && DEADLINE_P(a) -> p_decide(a, FAIL, true) } \
    :: d_step { EARLY && P_RUNS && pst[a] == PREFILL_COMPUTING -> /* a step that fails */ \
                faults--; p_step[a] = false; p_decide(a, FAIL, true); p_plan() } \
    :: d_step { EARLY && P_RUNS && chunk[a] == HANDED && near[PD] -> /* a send that fails, or T_stall */ \
                faults--; p_ends_pd(NO_CHUNK) } \
    :: d_step { EARLY && P_RUNS && chunk[a] == HANDED -> faults--; chunk[a] = HUNG } \
    :: d_step { EARLY && chunk[a] == FLYING -> faults--; chunk[a] = NO_CHUNK } /* lost */ \
    :: d_step { EARLY && chunk[a] == FLYING -> faults--; chunk[a] = DAMAGED }

active proctype Prefill() {
end:
    do
    :: d_step { MAIL_P_RP -> p_router_mail() }
    :: d_step { MAIL_P_PD -> p_decode_mail() }
    :: d_step { CUT_P_RP -> p_ends_rp() }
    :: d_step { CUT_P_PD -> p_ends_pd(NO_CHUNK) }
    :: d_step { CUT_P_PD && (SENDING(0) || SENDING(1)) -> p_ends_pd(FLYING) }
    :: d_step { QUIET && LEASE(p_stop, far[RP], r_stop, RP) -> p_ends_rp() }
    :: d_step { QUIET && LEASE(p_stop, near[PD], d_stop, PD) -> p_ends_pd(NO_CHUNK) }
    :: d_step { QUIET && T_STALL_P -> p_ends_pd(NO_CHUNK) }
    :: d_step { QUIET && T_STALL_P -> p_ends_pd(FLYING) }
    PREFILL_EVENTS(0)
    PREFILL_EVENTS(1)
    :: d_step { EARLY && MAIL_P_RP && (rp?[MESSAGE_PREFILL, 0, 0] || rp?[MESSAGE_PREFILL, 1, 0]) ->
                faults--; rp?kind, id, flag; post(pr, RP, far[RP], MESSAGE_BUSY, id, 0) }
    :: d_step { EARLY && P_RUNS -> p_crash(NO_CHUNK) }
    :: d_step { EARLY && P_RUNS && (SENDING(0) || SENDING(1)) -> p_crash(FLYING) }
#if AUDITS
#ifdef WRONG_AUDIT_OPENED
#define P_LISTS(a) (P_LIVE(a) && opened[a])
#else
#define P_LISTS(a) (P_LIVE(a) && accepted[a])
#endif
    :: d_step { P_RUNS && audits > 0 && far[RP] && P_LIVE(0) -> audits--; post(pr, RP, far[RP], MESSAGE_AUDIT, 0, 0) }
    :: d_step { P_RUNS && audits > 0 && far[RP] && P_LIVE(1) -> audits--; post(pr, RP, far[RP], MESSAGE_AUDIT, 1, 0) }
    :: d_step { P_RUNS && audits > 0 && near[PD] && P_LISTS(0) -> audits--; post(pd, PD, near[PD], MESSAGE_AUDIT, 0, 0) }
    :: d_step { P_RUNS && audits > 0 && near[PD] && P_LISTS(1) -> audits--; post(pd, PD, near[PD], MESSAGE_AUDIT, 1, 0) }
#endif
    od
}

#define SLOT_EVENTS(a) \
    :: d_step { CAN_LAND(a) -> d_chunk(a) } \
    :: d_step { D_RUNS && disarming[a] -> armed[a] = false; disarming[a] = false; d_settle(a) } \
    :: d_step { QUIET && T_OPEN(a) -> d_decide(a, FAIL, true) } \
    :: d_step { EARLY && T_OPEN(a) -> faults--; d_decide(a, FAIL, true) } \
    :: d_step { QUIET && T_STALL_D(a) -> d_decide(a, FAIL, true) } \
    :: d_step { EARLY && T_STALL_D(a) -> faults--; d_decide(a, FAIL, true) } \
    :: d_step { QUIET && DEADLINE_D(a) -> d_decide(a, FAIL, true) } \
    :: d_step { EARLY && D_RUNS && dst[a] == DECODE_RUNNING -> /* a step that fails */ \
                faults--; d_step_of[a] = false; d_decide(a, FAIL, true) }

active proctype Decode() {
end:
    do
    :: d_step { MAIL_D_RD -> d_router_mail() }
    :: d_step { MAIL_D_PD -> d_prefill_mail() }
    :: d_step { CUT_D(RD) -> d_ends_rd() }
    :: d_step { CUT_D(PD) -> d_ends_pd() }
    :: d_step { QUIET && LEASE(d_stop, far[RD], r_stop, RD) -> d_ends_rd() }
    :: d_step { QUIET && LEASE(d_stop, far[PD], p_stop, PD) -> d_ends_pd() }
    :: d_step { D_RUNS && d_step_of[0] -> d_step_done(0) }
    :: d_step { D_RUNS && d_step_of[1] -> d_step_done(1) }
    :: d_step { D_RUNS && d_step_of[2] -> d_step_done(2) }
    SLOT_EVENTS(0)
    SLOT_EVENTS(1)
    :: d_step { EARLY && D_RUNS -> d_crash() }
#if AUDITS
#ifdef WRONG_AUDIT_RESERVED
#define D_LISTS(a) (dst[a] == DECODE_RECEIVING || dst[a] == DECODE_RESERVED)
#else
#define D_LISTS(a) (dst[a] == DECODE_RECEIVING)
#endif
    :: d_step { D_RUNS && audits > 0 && far[RD] && D_LIVE(0) -> audits--; post(dr, RD, far[RD], MESSAGE_AUDIT, 0, 0) }
    :: d_step { D_RUNS && audits > 0 && far[RD] && D_LIVE(1) -> audits--; post(dr, RD, far[RD], MESSAGE_AUDIT, 1, 0) }
    :: d_step { D_RUNS && audits > 0 && far[PD] && D_LISTS(0) -> audits--; post(dp, PD, far[PD], MESSAGE_AUDIT, 0, 0) }
    :: d_step { D_RUNS && audits > 0 && far[PD] && D_LISTS(1) -> audits--; post(dp, PD, far[PD], MESSAGE_AUDIT, 1, 0) }
#endif
    od
}

/* Breaks, new sessions, processes that stop. */
active proctype Network() {
end:
    do
    :: d_step { EARLY && alive[RD] -> faults--; alive[RD] = false }
    :: d_step { EARLY && alive[RP] -> faults--; alive[RP] = false }
    :: d_step { EARLY && alive[PD] -> faults--; alive[PD] = false }
    /* The next session starts when both ends have noticed. */
    :: d_step { DOWN_RD ->
                assert(!R_LEG(A) && !R_LEG(B)); /* no entry outlives its session */
                assert(!D_LIVE(0) && !D_LIVE(1) && !D_LIVE(2)); /* no entry outlives its session */
                alive[RD] = true; near[RD] = true; far[RD] = true }
    :: d_step { DOWN_RP ->
                assert(!has_prefill && !P_LIVE(0) && !P_LIVE(1)); /* no entry outlives its session */
                alive[RP] = true; near[RP] = true; far[RP] = true }
    :: d_step { DOWN_PD ->
                assert(!(P_LIVE(0) && opened[0]) && !(P_LIVE(1) && opened[1])); /* no entry outlives its session */
                assert(dst[0] != DECODE_RECEIVING && dst[1] != DECODE_RECEIVING); /* no entry outlives its session */
                alive[PD] = true; near[PD] = true; far[PD] = true;
                p_open(0); p_open(1) }
    :: d_step { EARLY && R_RUNS -> faults--; r_stop = SILENT }
    :: d_step { EARLY && R_RUNS -> faults--; r_stop = MUTE }
    :: d_step { EARLY && P_RUNS -> faults--; p_stop = SILENT }
    :: d_step { EARLY && P_RUNS -> faults--; p_stop = MUTE }
    :: d_step { EARLY && D_RUNS -> faults--; d_stop = SILENT }
    :: d_step { EARLY && D_RUNS -> faults--; d_stop = MUTE }
    od
}

/* Nothing can happen any more, no clock is left: then every request has ended and everything is free, in every process
 * that still runs, whatever the others do (D frees alone). */
#define REST_R (!R_RUNS || (rst[A] == REQUEST_NONE && rst[B] == REQUEST_NONE))
#define REST_P (!P_RUNS || (pst[0] == PREFILL_NONE && pst[1] == PREFILL_NONE))
#define REST_D (!D_RUNS || (dst[0] == DECODE_NONE && dst[1] == DECODE_NONE && dst[2] == DECODE_NONE && owner == FREE && \
                            !armed[0] && !armed[1]))

/* Places that the search must come to, or it would prove nothing. */
#if REACH == 1
#define SEEN (answered[A] && answered[B] && attempt == 0 && may_leave && delivered[A] == TOKENS && delivered[B] == TOKENS)
#elif REACH == 2
#define SEEN (rst[A] == REQUEST_ANSWERING && attempt == 1 && delivered[A] == TOKENS && may_leave && owner == FREE)
#elif REACH == 3
#define SEEN (rst[A] == REQUEST_ASKING && dr?[MESSAGE_COMMITTED, 0, 0])
#elif REACH == 4
#define SEEN (chunk[0] == FLYING && !armed[0] && owner == 2)
#elif REACH == 5
#define SEEN (dst[1] == DECODE_RUNNING && next[1] == 1 && delivered[A] == 1 && pst[0] == PREFILL_LEAVING)
#endif

active proctype Watch() {
#ifdef CYCLES
accept: /* always here: every cycle is an accepted one */
#endif
end:
    do
    :: d_step { QUIET && !CLOCKS && !(REST_R && REST_P && REST_D) ->
                assert(REST_D); /* D frees alone */
                assert(REST_P); /* P frees alone */
                assert(REST_R)  /* every request ends */ }
#if REACH
    :: d_step { SEEN -> assert(false) /* reached */ }
#endif
    od
}
