-------------------------------- MODULE Runs --------------------------------
(***************************************************************************)
(* Work that is unique until it has ended (once_per="run"): which run a    *)
(* message belongs to, which run is open and which one follows, and the    *)
(* faults until each run has ended.  Taskguard.tla models leases and       *)
(* fencing tokens.  Enqueue.tla models duplicate= for one run.  Invariants *)
(* have the names of docs/architecture.md.                                 *)
(*                                                                         *)
(* What is modelled                                                        *)
(*                                                                         *)
(*   One task and key, one ledger, one broker.  Messages begin in the      *)
(*     order of their numbers: a higher number has newer arguments.  A     *)
(*     message is sent without enqueue(), or enqueued to answer, attach or *)
(*     replace.  The id of a run is the message that opened it.            *)
(*   The pointer has the open run and the one that follows.  An enqueue    *)
(*     locks it from its reading until its COMMIT or ROLLBACK.  A claim    *)
(*     locks it, finds the run of its message, and decides in a second     *)
(*     step.  A deferral is one step.                                      *)
(*   Whatever ends a run changes its record alone, and does not wait for   *)
(*     the pointer.  So a run may end between the reading of an enqueue    *)
(*     and its COMMIT, and between the two steps of a claim.  An enqueue   *)
(*     locks a record only to store its call.                              *)
(*   A run: its state, whether it has ended for good, its owner, the       *)
(*     message that it names, whether the call of that message is stored,  *)
(*     and whether it is promised: by its lease, or by a retry.            *)
(*   A stored call is sent again until its run ends, once no promise is    *)
(*     left.  Only the message of a stored call is granted its run.        *)
(*   A run without promise and stored call has lapsed: an enqueue stores   *)
(*     its call there, and the run that follows takes its place.           *)
(*   Faults, at most MaxFaults: a worker dies, and the broker delivers its *)
(*     message again; a lease ends while its holder works, which may renew *)
(*     it; a worker gives its run back; a body fails, with a retry or      *)
(*     without; the key is taken by other work; a message is delivered     *)
(*     twice, at any time, or lost; a producer dies after COMMIT, or rolls *)
(*     back; a message is revoked; an operator requeues a run that failed, *)
(*     which is refused while another run is open or follows.              *)
(*                                                                         *)
(* What is left out                                                        *)
(*                                                                         *)
(*   Lines: a message that is parked joins as one that is deferred does.   *)
(*   DEAD runs, the purge, the user's own row, a COMMIT whose answer is    *)
(*   lost (Enqueue.tla), and crashes of the database.                      *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Workers,
    Last,       \* the number of the last message
    Plain,      \* the messages that are sent without enqueue()
    Answering,  \* those that are enqueued with duplicate="answer"
    Attaching,  \* those with "attach"; "skip" and "raise" differ from it in what they report
    Replacing,  \* those with "replace". A message of several sets is of one of them
    Fates,      \* which faults there are
    MaxFaults,
    Mutant,     \* the mistake in the design; "none" is the design
    Free,       \* no owner
    Dead        \* an owner that has died

ASSUME Fates \subseteq {"crash", "pause", "shutdown", "fails", "gives up", "taken", "twice", "loss",
                        "producer", "rollback", "revoked", "requeued"}

ASSUME Mutant \in {
    "none",
    "open run first",        \* a message belongs to the open run, even if it is a member of another one
    "member begins again",   \* a member of an ended run counts as a member of none
    "follows too early",     \* the run that follows is opened while the open one has not ended
    "replace dropped",       \* a "replace" while a body runs stores nothing
    "late holder",           \* a "replace" stores its call in a run whose late holder may complete it
    "lapsed silences",       \* an enqueue attaches to a run that nothing continues
    "lapsed blocks",         \* the run that follows waits for one that nothing continues
    "following ignored",     \* a newcomer opens a run of its own, although another one follows
    "following trusted",     \* the run that follows is opened although it was revoked
    "older runs",            \* any message is granted a run that has a stored call
    "opener revokes",        \* a replaced message ends the run that it opened if it is revoked
    "old snapshot",          \* an enqueue reads a record as it was before its run ended
    "ended in between",      \* a claim trusts what it has found, although that run has ended since
    "lapse unchecked",       \* or although the lapsed run was continued since
    "requeued beside",       \* a failed run is requeued while a later one is open
    "not locked"}            \* a claim does not wait for the pointer

VARIABLES
    copies,    \* how many copies of each message are in the broker
    pointer,   \* the open run and the one that follows, or 0
    run,       \* the record of each run
    member,    \* the run that each message has joined, or 0
    replaced,  \* the messages whose call was replaced
    locked,    \* the message whose enqueue has locked the pointer, or 0
    producer,  \* of each message: how it is sent, the step, what its COMMIT writes, and to which run
    worker,    \* the step of each worker, its message, and the run that its claim has found
    faults,
    gone,      \* the messages that were lost or revoked
    history    \* the message that completed each run, the newest that began, and what is forbidden

vars == <<copies, pointer, run, member, replaced, locked, producer, worker, faults, gone, history>>

Messages == 1..Last
Empty == [state |-> "none", final |-> FALSE, owner |-> Free, named |-> 0, stored |-> FALSE,
          promised |-> FALSE]
None == [run |-> 0, opens |-> FALSE, waits |-> FALSE, ends |-> 0]
Idle == [at |-> "idle", m |-> 0, found |-> None]

Init ==
    /\ copies = [m \in Messages |-> 0]
    /\ pointer = [open |-> 0, follows |-> 0]
    /\ run = [r \in Messages |-> Empty]
    /\ member = [m \in Messages |-> 0]
    /\ replaced = {}
    /\ locked = 0
    /\ producer = [m \in Messages |-> [way |-> "none", at |-> "begins", plan |-> "none", run |-> 0]]
    /\ worker = [w \in Workers |-> Idle]
    /\ faults = 0
    /\ gone = {}
    /\ history = [by |-> [r \in Messages |-> 0], begun |-> 0, twice |-> FALSE, moved |-> FALSE,
                  again |-> FALSE, unasked |-> FALSE]

Fault(kind) == kind \in Fates /\ faults < MaxFaults /\ faults' = faults + 1
NoFault == UNCHANGED faults
Added(m) == [copies EXCEPT ![m] = @ + 1]
InHand(m) == \E w \in Workers : worker[w].m = m

(***************************************************************************)
(* Runs.                                                                   *)
(***************************************************************************)

HasEnded(r) == run[r].state = "DONE" \/ run[r].final
IsOpen(r) == r # 0 /\ run[r].state # "none" /\ ~HasEnded(r)
Lapsed(r) == ~run[r].promised /\ ~run[r].stored
OfEnded(m) == member[m] # 0 /\ HasEnded(member[m])
Open == IF IsOpen(pointer.open) THEN pointer.open ELSE 0
\* A run that was revoked does not follow.
Follows == IF IsOpen(pointer.follows) \/ Mutant = "following trusted" THEN pointer.follows ELSE 0

Fresh(m) == [Empty EXCEPT !.state = "NEW", !.named = m, !.stored = TRUE]
\* The call stays stored, for an operator's requeue.
GaveUp(r) == [r EXCEPT !.state = "FAILED", !.final = TRUE, !.owner = Free, !.promised = FALSE]

\* The run of a message, whether it becomes the open one, whether the message waits for the open run's
\* end, and the lapsed run whose place it takes.
Found(r, opens, waits, ends) == [run |-> r, opens |-> opens, waits |-> waits, ends |-> ends]
MemberOf(m) ==
    IF \/ Mutant = "open run first" /\ Open # 0
       \/ Mutant = "member begins again" /\ OfEnded(m)
    THEN 0 ELSE member[m]
Resolved(m) ==
    LET r == MemberOf(m) IN
    CASE r # 0 /\ r # Follows -> Found(r, FALSE, FALSE, 0)
      [] r # 0 /\ Open = 0 -> Found(r, TRUE, FALSE, 0)
      [] r # 0 /\ Mutant = "follows too early" -> Found(r, TRUE, FALSE, 0)
      [] r # 0 /\ Lapsed(Open) /\ Mutant # "lapsed blocks" -> Found(r, TRUE, FALSE, Open)
      [] r # 0 -> Found(r, FALSE, TRUE, 0)
      [] r = 0 /\ Open # 0 -> Found(Open, FALSE, FALSE, 0)
      [] r = 0 /\ Follows # 0 /\ Mutant # "following ignored" -> Found(Follows, TRUE, FALSE, 0)
      [] OTHER -> Found(m, TRUE, FALSE, 0)

Joined(m, r) == member' = [member EXCEPT ![m] = r]
Claiming == \E w \in Workers : worker[w].at = "claims"
Unlocked == (locked = 0 \/ Mutant = "not locked") /\ ~Claiming
RowLocked(r) == locked # 0 /\ producer[locked].run = r /\ producer[locked].plan \in {"store", "change"}

(***************************************************************************)
(* Sending and enqueueing.                                                 *)
(***************************************************************************)

At(m, place) == producer' = [producer EXCEPT ![m].at = place]

Begins(m) == producer[m].at = "begins" /\ IF m = 1 THEN TRUE ELSE producer[m - 1].at # "begins"

SendPlain(m) ==
    /\ Begins(m) /\ m \in Plain
    /\ producer' = [producer EXCEPT ![m].way = "plain", ![m].at = "done"]
    /\ copies' = Added(m)
    /\ NoFault
    /\ UNCHANGED <<pointer, run, member, replaced, locked, worker, gone, history>>

\* What an enqueue writes, by what it reads.
Plan(way, r) ==
    CASE r = 0 -> "new"
      [] way = "replace" /\ run[r].state = "PROCESSING" ->
            CASE Mutant = "replace dropped" -> "join"
              [] Mutant = "late holder" /\ Lapsed(r) -> "store"
              [] OTHER -> "follow"
      [] way = "replace" -> "change"
      [] Lapsed(r) -> IF way = "attach" /\ Mutant = "lapsed silences" THEN "silenced" ELSE "store"
      [] way = "attach" -> "attach"
      [] OTHER -> "join"

Decide(m, way) ==
    LET r == CASE Follows # 0 /\ Mutant # "following ignored" -> Follows
               [] Mutant = "old snapshot" -> pointer.open
               [] OTHER -> Open
    IN
    /\ Begins(m) /\ locked = 0 /\ ~Claiming
    /\ locked' = m
    /\ producer' = [producer EXCEPT ![m] = [
           way |-> way, at |-> "open", plan |-> Plan(way, r),
           run |-> IF Plan(way, r) \in {"new", "follow"} THEN m ELSE r]]
    /\ history' = [history EXCEPT !.unasked = @ \/ (r # 0 /\ HasEnded(r))]
    /\ NoFault
    /\ UNCHANGED <<copies, pointer, run, member, replaced, worker, gone>>

Enqueue(m) ==
    \/ m \in Answering /\ Decide(m, "answer")
    \/ m \in Attaching /\ Decide(m, "attach")
    \/ m \in Replacing /\ Decide(m, "replace")

Commit(m) ==
    LET r == producer[m].run
        plan == producer[m].plan
        waits == IF run[r].state = "FAILED" THEN "NEW" ELSE run[r].state
    IN
    /\ producer[m].at = "open"
    /\ locked' = 0
    /\ At(m, IF plan \in {"attach", "silenced"} THEN "done" ELSE "sends")
    /\ pointer' = CASE plan = "new" -> [open |-> m, follows |-> 0]
                    [] plan = "follow" -> [pointer EXCEPT !.follows = m]
                    [] OTHER -> pointer
    /\ run' = CASE plan \in {"new", "follow"} -> [run EXCEPT ![m] = Fresh(m)]
                [] plan = "change" -> [run EXCEPT ![r] = Fresh(m)]
                [] plan = "store" -> [run EXCEPT ![r].state = waits, ![r].named = m, ![r].stored = TRUE]
                [] OTHER -> run
    /\ replaced' = IF plan = "change" THEN replaced \cup {run[r].named} ELSE replaced
    /\ IF plan \in {"attach", "silenced"} THEN UNCHANGED member ELSE Joined(m, r)
    /\ NoFault
    /\ UNCHANGED <<copies, worker, gone, history>>

RollBack(m) ==
    /\ producer[m].at = "open"
    /\ Fault("rollback")
    /\ locked' = 0
    /\ At(m, "rolled back")
    /\ UNCHANGED <<copies, pointer, run, member, replaced, worker, gone, history>>

Send(m) ==
    /\ producer[m].at = "sends"
    /\ At(m, "done")
    /\ copies' = Added(m)
    /\ NoFault
    /\ UNCHANGED <<pointer, run, member, replaced, locked, worker, gone, history>>

ProducerDies(m) ==
    /\ producer[m].at = "sends"
    /\ Fault("producer")
    /\ At(m, "done")
    /\ UNCHANGED <<copies, pointer, run, member, replaced, locked, worker, gone, history>>

(***************************************************************************)
(* The way of one delivery.                                                *)
(***************************************************************************)

\* A claim locks the pointer, and finds the run.
Receive(w, m) ==
    /\ worker[w].at = "idle" /\ copies[m] > 0 /\ Unlocked
    /\ copies' = [copies EXCEPT ![m] = @ - 1]
    /\ worker' = [worker EXCEPT ![w] = [at |-> "claims", m |-> m, found |-> Resolved(m)]]
    /\ NoFault
    /\ UNCHANGED <<pointer, run, member, replaced, locked, producer, gone, history>>

RunOf(w) == worker[w].found.run
IsNew(w) == MemberOf(worker[w].m) = 0 /\ RunOf(w) = worker[w].m
IsEnded(w) == ~IsNew(w) /\ HasEnded(RunOf(w))
IsMember(w) == MemberOf(worker[w].m) # 0

\* The claim has to find the run again: that run has ended, or the holder of the open one has renewed
\* its lease.
IsOld(w) ==
    LET ends == worker[w].found.ends IN
    \/ IsEnded(w) /\ ~IsMember(w) /\ Mutant \notin {"ended in between", "following trusted"}
    \/ ends # 0 /\ IsOpen(ends) /\ ~Lapsed(ends) /\ Mutant # "lapse unchecked"
IsAnswered(w) == worker[w].m \in replaced \/ (IsEnded(w) /\ ~IsOld(w))

\* Another run of the key has a live lease.
KeyHeld(r) == \E o \in Messages \ {r} : run[o].state = "PROCESSING" /\ run[o].promised

IsRefused(w) ==
    LET r == RunOf(w) IN
    \/ worker[w].found.waits
    \/ KeyHeld(r)
    \/ run[r].state = "PROCESSING" /\ run[r].promised
    \/ run[r].stored /\ run[r].named # worker[w].m /\ Mutant # "older runs"

FindAgain(w) ==
    /\ worker[w].at = "claims" /\ worker[w].m \notin replaced /\ IsOld(w)
    /\ worker' = [worker EXCEPT ![w].found = Resolved(worker[w].m)]
    /\ NoFault
    /\ UNCHANGED <<copies, pointer, run, member, replaced, locked, producer, gone, history>>

Answer(w) ==
    /\ worker[w].at = "claims" /\ IsAnswered(w)
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ history' = [history EXCEPT !.unasked = @ \/ ~(worker[w].m \in replaced \/ OfEnded(worker[w].m))]
    /\ NoFault
    /\ UNCHANGED <<copies, pointer, run, member, replaced, locked, producer, gone>>

Grant(w) ==
    LET m == worker[w].m
        found == worker[w].found
        r == found.run
        ends == found.ends # 0 /\ (IsOpen(found.ends) \/ Mutant = "lapse unchecked")
        ended == IF ends THEN [run EXCEPT ![found.ends] = GaveUp(@)] ELSE run
    IN
    /\ worker[w].at = "claims"
    /\ ~IsAnswered(w) /\ ~IsOld(w) /\ ~IsRefused(w)
    /\ run' = [ended EXCEPT ![r] = [
           state |-> "PROCESSING", final |-> FALSE, owner |-> w, promised |-> TRUE,
           named |-> IF @.stored THEN @.named ELSE m, stored |-> @.stored]]
    /\ pointer' = IF found.opens THEN [open |-> r, follows |-> 0] ELSE pointer
    /\ Joined(m, r)
    /\ worker' = [worker EXCEPT ![w].at = "body"]
    /\ history' = [history EXCEPT !.begun = IF m > @ THEN m ELSE @,
                                  !.moved = @ \/ member[m] \notin {0, r},
                                  !.again = @ \/ HasEnded(r) \/ OfEnded(m)]
    /\ NoFault
    /\ UNCHANGED <<copies, replaced, locked, producer, gone>>

\* The delivery is refused. That changes nothing. Its deferral is a transaction of its own.
Refuse(w) ==
    /\ worker[w].at = "claims" /\ ~IsAnswered(w) /\ ~IsOld(w)
    /\ \/ IsRefused(w) /\ NoFault
       \/ Fault("taken")
    /\ worker' = [worker EXCEPT ![w] = [@ EXCEPT !.at = "defers", !.found = None]]
    /\ UNCHANGED <<copies, pointer, run, member, replaced, locked, producer, gone, history>>

\* The message joins the open run, if there is one, and comes again.
Defer(w) ==
    LET m == worker[w].m IN
    /\ worker[w].at = "defers" /\ Unlocked
    /\ IF MemberOf(m) = 0 /\ Open # 0
       THEN Joined(m, Open) /\ history' = [history EXCEPT !.moved = @ \/ member[m] \notin {0, Open}]
       ELSE UNCHANGED <<member, history>>
    /\ copies' = Added(m)
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ NoFault
    /\ UNCHANGED <<pointer, run, replaced, locked, producer, gone>>

Owns(w) == run[RunOf(w)].state = "PROCESSING" /\ run[RunOf(w)].owner = w

\* A body ends, and its record changes, if the record is still its worker's. Otherwise its message
\* comes again.
End(w, record, again) ==
    LET r == RunOf(w) IN
    /\ worker[w].at = "body" /\ ~RowLocked(r)
    /\ run' = IF Owns(w) THEN [run EXCEPT ![r] = record] ELSE run
    /\ copies' = IF Owns(w) /\ ~again THEN copies ELSE Added(worker[w].m)
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ UNCHANGED <<pointer, member, replaced, locked, producer, gone>>

Complete(w) ==
    LET r == RunOf(w) IN
    /\ End(w, [run[r] EXCEPT !.state = "DONE", !.owner = Free, !.promised = FALSE, !.stored = FALSE],
           FALSE)
    /\ history' = IF ~Owns(w) THEN history
                  ELSE [history EXCEPT !.by[r] = worker[w].m, !.twice = @ \/ history.by[r] # 0]
    /\ NoFault

Fail(w) ==
    /\ End(w, [run[RunOf(w)] EXCEPT !.state = "FAILED", !.owner = Free], TRUE)
    /\ Fault("fails")
    /\ UNCHANGED history

GiveUp(w) ==
    /\ End(w, GaveUp(run[RunOf(w)]), FALSE)
    /\ Fault("gives up")
    /\ UNCHANGED history

GiveBack(w) ==
    /\ End(w, [run[RunOf(w)] EXCEPT !.state = "NEW", !.owner = Free], TRUE)
    /\ Fault("shutdown")
    /\ UNCHANGED history

Step(w) == FindAgain(w) \/ Answer(w) \/ Grant(w) \/ Refuse(w) \/ Defer(w) \/ Complete(w)

(***************************************************************************)
(* Faults, time and the relay.                                             *)
(***************************************************************************)

Crash(w) ==
    /\ worker[w].at # "idle"
    /\ Fault("crash")
    /\ copies' = Added(worker[w].m)
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ run' = [r \in Messages |-> IF run[r].owner = w
                                  THEN [run[r] EXCEPT !.owner = Dead, !.promised = FALSE] ELSE run[r]]
    /\ UNCHANGED <<pointer, member, replaced, locked, producer, gone, history>>

\* The lease of a holder that is alive ends.
Pause(r) ==
    /\ run[r].state = "PROCESSING" /\ run[r].promised
    /\ Fault("pause")
    /\ run' = [run EXCEPT ![r].promised = FALSE]
    /\ UNCHANGED <<copies, pointer, member, replaced, locked, producer, worker, gone, history>>

Renew(w) ==
    /\ worker[w].at = "body" /\ Owns(w) /\ ~run[RunOf(w)].promised
    /\ run' = [run EXCEPT ![RunOf(w)].promised = TRUE]
    /\ NoFault
    /\ UNCHANGED <<copies, pointer, member, replaced, locked, producer, worker, gone, history>>

\* The message that was to come has not come in time.
PromiseEnds(r) ==
    /\ run[r].state \in {"NEW", "FAILED"} /\ run[r].promised
    /\ run' = [run EXCEPT ![r].promised = FALSE]
    /\ NoFault
    /\ UNCHANGED <<copies, pointer, member, replaced, locked, producer, worker, gone, history>>

Duplicate(m) ==
    /\ producer[m].at = "done" /\ producer[m].plan \notin {"attach", "silenced"}
    /\ Fault("twice")
    /\ copies' = Added(m)
    /\ UNCHANGED <<pointer, run, member, replaced, locked, producer, worker, gone, history>>

Lose(m) ==
    /\ copies[m] > 0
    /\ Fault("loss")
    /\ copies' = [copies EXCEPT ![m] = @ - 1]
    /\ gone' = gone \cup {m}
    /\ UNCHANGED <<pointer, run, member, replaced, locked, producer, worker, history>>

\* A worker gets a message that was revoked. Its run ends if the stored call is that message's. A run
\* without a stored call ends if the message opened it.
Revoke(m) ==
    LET r == member[m]
        ends == /\ IsOpen(r)
                /\ IF run[r].stored /\ Mutant # "opener revokes" THEN run[r].named = m ELSE r = m
    IN
    /\ copies[m] > 0 /\ ~RowLocked(r)
    /\ Fault("revoked")
    /\ copies' = [copies EXCEPT ![m] = @ - 1]
    /\ run' = IF ends THEN [run EXCEPT ![r] = GaveUp(@)] ELSE run
    /\ gone' = gone \cup {m}
    /\ UNCHANGED <<pointer, member, replaced, locked, producer, worker, history>>

\* The run becomes the open one again, and the broker gets its message.
Requeue(m) ==
    LET r == member[m] IN
    /\ r # 0 /\ m \notin replaced
    /\ run[r].state = "FAILED" /\ run[r].final
    /\ run[r].stored => run[r].named = m
    /\ locked = 0 /\ ~Claiming
    /\ (Open = 0 /\ Follows = 0) \/ Mutant = "requeued beside"
    /\ Fault("requeued")
    /\ run' = [run EXCEPT ![r] = [Empty EXCEPT !.state = "NEW", !.named = m, !.stored = run[r].stored]]
    /\ pointer' = [open |-> r, follows |-> 0]
    /\ copies' = Added(m)
    /\ UNCHANGED <<member, replaced, locked, producer, worker, gone, history>>

\* A relay, or a sweep, sends the message of a stored call.
Relay(m) ==
    /\ \E r \in Messages : IsOpen(r) /\ run[r].stored /\ run[r].named = m /\ ~run[r].promised
    /\ copies[m] = 0 /\ ~InHand(m) /\ producer[m].at # "sends"
    /\ copies' = Added(m)
    /\ NoFault
    /\ UNCHANGED <<pointer, run, member, replaced, locked, producer, worker, gone, history>>

Next ==
    \/ \E m \in Messages :
        \/ SendPlain(m) \/ Enqueue(m) \/ Commit(m) \/ RollBack(m) \/ Send(m) \/ ProducerDies(m)
        \/ Duplicate(m) \/ Lose(m) \/ Revoke(m) \/ Requeue(m) \/ Relay(m) \/ Pause(m) \/ PromiseEnds(m)
    \/ \E w \in Workers :
        \/ Step(w) \/ Fail(w) \/ GiveUp(w) \/ GiveBack(w) \/ Crash(w) \/ Renew(w)
        \/ \E m \in Messages : Receive(w, m)

Spec == Init /\ [][Next]_vars

Fairness ==
    /\ \A m \in Messages : WF_vars(SendPlain(m) \/ Enqueue(m)) /\ WF_vars(Commit(m)) /\ WF_vars(Send(m))
    /\ \A m \in Messages : WF_vars(Relay(m)) /\ WF_vars(PromiseEnds(m))
    /\ \A m \in Messages : SF_vars(\E w \in Workers : Receive(w, m))
    /\ \A w \in Workers : SF_vars(Step(w))

FairSpec == Spec /\ Fairness

(***************************************************************************)
(* Invariants and liveness.                                                *)
(***************************************************************************)

\* Each run is completed once.
S2 == ~history.twice

\* No two runs have live leases.
S5 == \A r \in Messages : ~(run[r].state = "PROCESSING" /\ run[r].promised /\ KeyHeld(r))

\* One run is open, and one follows, which nobody has begun.
S13 ==
    /\ \A r \in Messages : IsOpen(r) => r \in {pointer.open, pointer.follows}
    /\ pointer.open = pointer.follows => pointer.open = 0
    /\ IsOpen(pointer.follows) => run[pointer.follows].state = "NEW" /\ run[pointer.follows].stored

\* A message belongs to one run, and begins no body after that has ended.
S14 == ~history.moved /\ ~history.again

\* What is committed stays DONE.
S6 == \A r \in Messages : history.by[r] # 0 => run[r].state = "DONE"

\* A message is answered by the run that it belongs to, or because it was replaced. An enqueue trusts no
\* run that has ended before.
S7 == ~history.unasked

\* The arguments of a "replace" take effect, or newer ones. If their run fails, a body with them, or
\* with newer ones, has begun.
S15 == \A m \in Messages :
    LET r == producer[m].run IN
    /\ producer[m].way = "replace" /\ producer[m].at \in {"sends", "done"}
    /\ m \notin replaced \cup gone /\ HasEnded(r)
    => IF run[r].state = "DONE" THEN history.by[r] >= m ELSE history.begun >= m

Committed(m) == producer[m].at = "done"

\* Each message is answered, and its run has ended, or a newer message has replaced it. A message that
\* attached sees the end of its run, unless messages are lost after that.
Settled(m) ==
    \/ producer[m].at = "rolled back"
    \/ /\ Committed(m) /\ copies[m] = 0 /\ ~InHand(m)
       /\ \/ m \in gone \cup replaced
          \/ IF producer[m].plan \in {"attach", "silenced"}
             THEN HasEnded(producer[m].run) \/ (producer[m].plan = "attach" /\ "loss" \in Fates)
             ELSE OfEnded(m)

L1 == <>(\A m \in Messages : Settled(m))

Symmetry == Permutations(Workers)
=============================================================================
