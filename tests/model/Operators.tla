----------------------------- MODULE Operators -----------------------------
(***************************************************************************)
(* An operator beside deliveries of one work: drop, done, requeue, pause,  *)
(* resume.                                                                 *)
(*                                                                         *)
(* What is modelled                                                        *)
(*                                                                         *)
(*   One work and its key.  A delivery claims both, and commits the effect *)
(*     with DONE, if both still have its fence and owner.                  *)
(*   The operator's changes, at any moment: each is one conditional step.  *)
(*     A pause at once ends the holder's lease, and has a lease on the key *)
(*     that does not expire.  Another pause waits until no delivery holds  *)
(*     the key, and writes nothing before.  A resume meanwhile is on       *)
(*     record, and the pause that began before it never completes.         *)
(*   Faults, MaxFaults of them: a holder is paused beyond its lease.       *)
(*                                                                         *)
(* What is left out                                                        *)
(*                                                                         *)
(*   Messages: every worker may deliver the work at any time.  Several     *)
(*   keys, slots, lines, records under other ids, DEAD work, which an      *)
(*   operator changes as FAILED work; crashes, which are pauses that do    *)
(*   not end.                                                              *)
(***************************************************************************)
EXTENDS Integers, FiniteSets

CONSTANTS
    Workers,
    MaxFences,  \* so many claims and pauses
    MaxFaults,
    Mutant,     \* what is wrong with the design; "none" is the design
    Nobody,     \* the owner of what is free
    Operator    \* the owner of a paused key

ASSUME Mutant \in {
    "none",
    "not final",     \* a later delivery runs dropped work
    "holders stay",  \* a pause at once leaves the holder's row as it is
    "pause expires", \* a pause has a lease like a delivery's
    "resume forgotten", \* a pause that waits does not read of a resume
    "no state check"} \* a commit names the fence and the owner, and not the state

VARIABLES
    key,     \* fence, owner, leased
    work,    \* state, fence, leased
    worker,  \* the fence of each worker's claim; 0: it runs nothing
    paused,  \* the operator takes the key for paused
    waiting, \* a pause: "no", "waits" for the holder, or was "resumed" meanwhile
    faults,
    history  \* effects, and what must not happen

vars == <<key, work, worker, paused, waiting, faults, history>>

Init ==
    /\ key = [fence |-> 0, owner |-> Nobody, leased |-> FALSE]
    /\ work = [state |-> "NEW", fence |-> 0, leased |-> FALSE]
    /\ worker = [w \in Workers |-> 0]
    /\ paused = FALSE
    /\ waiting = "no"
    /\ faults = 0
    /\ history = [effects |-> 0, ended |-> FALSE, begunAfter |-> FALSE, whilePaused |-> FALSE,
                  pausedAfter |-> FALSE]

Claimable ==
    \/ work.state \in {"NEW", "FAILED"}
    \/ work.state = "PROCESSING" /\ ~work.leased

Claim(w) ==
    /\ worker[w] = 0
    /\ Claimable
    /\ ~key.leased
    /\ key.fence < MaxFences
    /\ key' = [fence |-> key.fence + 1, owner |-> w, leased |-> TRUE]
    /\ work' = [state |-> "PROCESSING", fence |-> key.fence + 1, leased |-> TRUE]
    /\ worker' = [worker EXCEPT ![w] = key.fence + 1]
    /\ history' = [history EXCEPT !.begunAfter = @ \/ history.ended,
                                  !.whilePaused = @ \/ paused]
    /\ UNCHANGED <<paused, waiting, faults>>

Stands(w) ==
    /\ key.fence = worker[w] /\ key.owner = w
    /\ work.fence = worker[w]
    /\ work.state = "PROCESSING" \/ Mutant = "no state check"

\* The key has a free row, and the work this state.
EndsAs(state) ==
    /\ key' = [key EXCEPT !.owner = Nobody, !.leased = FALSE]
    /\ work' = [work EXCEPT !.state = state, !.leased = FALSE]

\* The commit, or its refusal, after which the delivery is deferred.
Commit(w) ==
    /\ worker[w] # 0
    /\ worker' = [worker EXCEPT ![w] = 0]
    /\ IF Stands(w)
       THEN /\ EndsAs("DONE")
            /\ history' = [history EXCEPT !.effects = @ + 1, !.whilePaused = @ \/ paused]
       ELSE UNCHANGED <<key, work, history>>
    /\ UNCHANGED <<paused, waiting, faults>>

Fail(w) ==
    /\ worker[w] # 0
    /\ worker' = [worker EXCEPT ![w] = 0]
    /\ IF Stands(w) THEN EndsAs("FAILED") ELSE UNCHANGED <<key, work>>
    /\ UNCHANGED <<paused, waiting, faults, history>>

Expire ==
    /\ key.leased
    /\ key.owner # Operator \/ Mutant = "pause expires"
    /\ faults < MaxFaults
    /\ faults' = faults + 1
    /\ key' = [key EXCEPT !.leased = FALSE]
    /\ work' = [work EXCEPT !.leased = FALSE]
    /\ UNCHANGED <<worker, paused, waiting, history>>

(***************************************************************************)
(* The operator.                                                           *)
(***************************************************************************)

End(state) ==
    /\ work.state \in {"NEW", "FAILED"}
    /\ work' = [work EXCEPT !.state = state]
    /\ history' = [history EXCEPT !.ended = TRUE]
    /\ UNCHANGED <<key, worker, paused, waiting, faults>>

Drop == End(IF Mutant = "not final" THEN "FAILED" ELSE "DROPPED")
Finish == End("DONE")

RequeueLeft ==
    /\ work.state = "PROCESSING"
    /\ ~work.leased
    /\ work' = [work EXCEPT !.state = "NEW"]
    /\ UNCHANGED <<key, worker, paused, waiting, faults, history>>

Pause ==
    /\ ~paused
    /\ key.fence < MaxFences
    /\ paused' = TRUE
    /\ IF Mutant = "holders stay" /\ key.leased THEN UNCHANGED <<key, work>>
       ELSE /\ key' = [fence |-> key.fence + 1, owner |-> Operator, leased |-> TRUE]
            /\ work' = [work EXCEPT !.leased = FALSE]
    /\ UNCHANGED <<worker, waiting, faults, history>>

Resume ==
    /\ paused
    /\ paused' = FALSE
    /\ key' = IF key.owner = Operator THEN [key EXCEPT !.owner = Nobody, !.leased = FALSE] ELSE key
    /\ waiting' = IF waiting = "waits" THEN "resumed" ELSE waiting
    /\ UNCHANGED <<work, worker, faults, history>>

Wait ==
    /\ ~paused
    /\ waiting = "no"
    /\ waiting' = "waits"
    /\ UNCHANGED <<key, work, worker, paused, faults, history>>

Completes ==
    /\ waiting \in IF Mutant = "resume forgotten" THEN {"waits", "resumed"} ELSE {"waits"}
    /\ ~paused
    /\ ~key.leased
    /\ key.fence < MaxFences
    /\ paused' = TRUE
    /\ waiting' = "no"
    /\ key' = [fence |-> key.fence + 1, owner |-> Operator, leased |-> TRUE]
    /\ history' = [history EXCEPT !.pausedAfter = @ \/ waiting = "resumed"]
    /\ UNCHANGED <<work, worker, faults>>

ResumeEarly ==
    /\ waiting = "waits"
    /\ waiting' = "resumed"
    /\ UNCHANGED <<key, work, worker, paused, faults, history>>

GiveUp ==
    /\ waiting # "no"
    /\ waiting' = "no"
    /\ UNCHANGED <<key, work, worker, paused, faults, history>>

Next ==
    \/ \E w \in Workers : Claim(w) \/ Commit(w) \/ Fail(w)
    \/ Expire \/ Drop \/ Finish \/ RequeueLeft \/ Pause \/ Resume
    \/ Wait \/ Completes \/ ResumeEarly \/ GiveUp

Spec == Init /\ [][Next]_vars

(***************************************************************************)
(* What must hold.                                                         *)
(***************************************************************************)

\* At most one committed effect.
S2 == history.effects <= 1

\* Work that an operator ended does not begin, and has no effect.
S16 == history.ended => ~history.begunAfter /\ history.effects = 0

\* No claim and no commit while the key is paused, and no pause after a later resume.
S17 == ~history.whilePaused /\ ~history.pausedAfter


=============================================================================
