------------------------------ MODULE Enqueue ------------------------------
(***************************************************************************)
(* Work that is unique from its enqueueing on: enqueue(duplicate="attach") *)
(* and enqueue(duplicate="replace") of one work, in transactions, and what *)
(* may befall until it is DONE.  Lines are Line.tla's, leases and fences   *)
(* Taskguard.tla's.  Invariants have the project's names.                  *)
(*                                                                         *)
(* What is modelled                                                        *)
(*                                                                         *)
(*   One work, one ledger, one broker.  Each message is enqueued once, in  *)
(*     any order: those of Attaching attach, the others replace.           *)
(*   A transaction that writes the work has its row locked from then on    *)
(*     until it commits or is rolled back, by its user or a crash of the   *)
(*     database; others see what is committed.  The message is sent after  *)
(*     the COMMIT.  Who attaches writes nothing, and locks nothing.        *)
(*   The row: its state, whose call it has, who has claimed it.  What is   *)
(*     NEW with a call is due: a relay sends its message if none is on its *)
(*     way.  A claim is not flushed: a crash of the database may take it   *)
(*     back.  Replaced messages are noted beside it, in the transaction.   *)
(*   A claim: one statement, which reads those notes as they are when it   *)
(*     begins, then waits for the row.  Of work that has become another    *)
(*     message's since it decides nothing: another one locks the row, then *)
(*     reads them.                                                         *)
(*   A body that fails is retried: its message comes again.                *)
(*   Faults, MaxFaults of them: a worker dies; its message comes again; a  *)
(*     message is lost, or delivered twice; a producer dies after COMMIT;  *)
(*     the database crashes; a body fails.                                 *)
(*                                                                         *)
(* What is left out                                                        *)
(*                                                                         *)
(*   Messages that are put off (one that finds the work in progress goes   *)
(*   back to the broker); more than one work or ledger.                    *)
(*   A lease ends when its holder is dead, never before.                   *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Workers,
    Last,       \* the number of the last message
    Attaching,  \* those that attach
    Fates,      \* which faults there are
    MaxFaults,
    Mutant,     \* what is wrong with the design; "none" is the design
    Nobody,
    Gone        \* whoever has died

ASSUME Fates \subseteq {"crash", "loss", "twice", "producer", "database", "fails"}

ASSUME Mutant \in {
    "none",
    "read before",           \* the claim in one statement decides by what it has read
    "replaced forgotten",    \* the message whose call was replaced is not noted
    "attached unseen",       \* one attaches to what is not committed
    "sent before",           \* a message is sent before its COMMIT
    "not due"}               \* what was committed is not due: who enqueued it is relied on to send it

VARIABLES
    copies,    \* how many of each message are in the broker
    row,       \* of the work: its state, whose call, its owner, whether it is due
    replaced,  \* the messages whose call was replaced
    disk,      \* row and replaced as they are after a crash of the database
    locked,    \* the message in whose transaction the row is locked, or 0
    producer,  \* of each message, where its enqueueing is, and the row that it would commit
    worker,
    faults,
    history    \* how many effects there are, and whether an outdated message has begun

vars == <<copies, row, replaced, disk, locked, producer, worker, faults, history>>

Messages == 1..Last
Empty == [state |-> "none", call |-> 0, owner |-> Nobody, due |-> FALSE]
Idle == [at |-> "idle", m |-> 0, noted |-> FALSE, call |-> 0]

Init ==
    /\ copies = [m \in Messages |-> 0]
    /\ row = Empty
    /\ replaced = {}
    /\ disk = [row |-> Empty, replaced |-> {}]
    /\ locked = 0
    /\ producer = [m \in Messages |-> [at |-> "begins", row |-> Empty, older |-> 0]]
    /\ worker = [w \in Workers |-> Idle]
    /\ faults = 0
    /\ history = [effects |-> 0, outdated |-> FALSE]

Fault(kind) == kind \in Fates /\ faults < MaxFaults /\ faults' = faults + 1
NoFault == UNCHANGED faults
Added(m) == [copies EXCEPT ![m] = @ + 1]
InHand(m) == \E w \in Workers : worker[w].m = m
Flushed == disk' = [row |-> row', replaced |-> replaced']
Unflushed == disk' \in {disk, [row |-> row', replaced |-> replaced']}
Read == UNCHANGED <<row, replaced, disk>>

(***************************************************************************)
(* Enqueueing.                                                             *)
(***************************************************************************)

Attaches(m) == m \in Attaching
At(m, place) == producer' = [producer EXCEPT ![m].at = place]

\* What it sees: the committed row, and of a locked one nothing until that transaction has ended.
Decide(m) ==
    /\ producer[m].at = "begins"
    /\ \/ /\ row.state = "none" \/ (row.state = "NEW" /\ ~Attaches(m))
          /\ locked = 0
          /\ locked' = m
          /\ producer' = [producer EXCEPT ![m] = [
                 at |-> "open",
                 row |-> [row EXCEPT !.state = "NEW", !.call = m, !.due = Mutant # "not due"],
                 older |-> row.call]]
          /\ copies' = IF Mutant = "sent before" THEN Added(m) ELSE copies
       \/ /\ Attaches(m) /\ row.state \in {"NEW", "PROCESSING", "FAILED"}
          /\ At(m, "attached")
          /\ UNCHANGED <<copies, locked>>
       \/ /\ Attaches(m) /\ row.state = "none" /\ locked # 0 /\ Mutant = "attached unseen"
          /\ At(m, "attached")
          /\ UNCHANGED <<copies, locked>>
       \/ /\ ~Attaches(m) /\ row.state \in {"PROCESSING", "FAILED"}
          /\ At(m, "refused")
          /\ UNCHANGED <<copies, locked>>
       \/ /\ row.state = "DONE"
          /\ At(m, "sends") \* and is answered
          /\ UNCHANGED <<copies, locked>>
    /\ Read /\ NoFault
    /\ UNCHANGED <<worker, history>>

Commit(m) ==
    /\ producer[m].at = "open"
    /\ row' = producer[m].row
    /\ replaced' = IF producer[m].older = 0 \/ Mutant = "replaced forgotten" THEN replaced
                   ELSE replaced \cup {producer[m].older}
    /\ Flushed
    /\ locked' = 0
    /\ At(m, "sends")
    /\ NoFault
    /\ UNCHANGED <<copies, worker, history>>

\* By its user, or by the database that has crashed.
RollBack(m) ==
    /\ producer[m].at = "open"
    /\ locked' = 0
    /\ At(m, "rolled back")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, worker, history>>

Send(m) ==
    /\ producer[m].at = "sends"
    /\ At(m, "sent")
    /\ copies' = IF Mutant = "sent before" /\ producer[m].row.state = "NEW" THEN copies ELSE Added(m)
    /\ Read /\ NoFault
    /\ UNCHANGED <<locked, worker, history>>

ProducerDies(m) ==
    /\ producer[m].at = "sends"
    /\ Fault("producer")
    /\ At(m, "died")
    /\ Read
    /\ UNCHANGED <<copies, locked, worker, history>>

(***************************************************************************)
(* The way of one delivery.                                                *)
(***************************************************************************)

Goto(w, place) == worker' = [worker EXCEPT ![w].at = place]

Receive(w, m) ==
    /\ worker[w].at = "idle" /\ copies[m] > 0
    /\ copies' = [copies EXCEPT ![m] = @ - 1]
    /\ worker' = [worker EXCEPT ![w].at = "claims", ![w].m = m]
    /\ Read /\ NoFault
    /\ UNCHANGED <<locked, producer, history>>

\* The statement begins, and may have to wait for the row.
Claim(w) ==
    /\ worker[w].at = "claims"
    /\ worker' = [worker EXCEPT ![w].at = "waits", ![w].noted = worker[w].m \in replaced,
                                ![w].call = row.call]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, locked, producer, history>>

Free ==
    \/ row.state \in {"none", "NEW", "FAILED"}
    \/ row.state = "PROCESSING" /\ row.owner = Gone

Grant(w) ==
    /\ row' = [row EXCEPT !.state = "PROCESSING", !.owner = w, !.due = FALSE,
                          !.call = IF @ = 0 THEN worker[w].m ELSE @]
    /\ UNCHANGED replaced
    /\ Unflushed
    /\ Goto(w, "body")
    /\ history' = [history EXCEPT !.outdated = @ \/ worker[w].m \in replaced
                                                 \/ row.call \notin {0, worker[w].m}]
    /\ UNCHANGED copies

\* Superseded, or the work is done: there is an answer, which is acknowledged.
Answered(w, noted) ==
    /\ noted \/ row.state = "DONE"
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ UNCHANGED <<row, replaced, disk, copies, history>>

\* Somebody is at it: the message comes again.
Busy(w, noted) ==
    /\ ~noted /\ row.state = "PROCESSING" /\ row.owner # Gone
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ copies' = Added(worker[w].m)
    /\ UNCHANGED <<row, replaced, disk, history>>

Unknown(w) == row.call # worker[w].call /\ row.state # "DONE" /\ Mutant # "read before"
ClaimDecides(w) ==
    /\ worker[w].at = "waits"
    /\ locked = 0
    /\ IF ~worker[w].noted /\ Unknown(w)
       THEN Goto(w, "looks") /\ UNCHANGED <<row, replaced, disk, copies, history>>
       ELSE \/ Answered(w, worker[w].noted)
            \/ Busy(w, worker[w].noted)
            \/ ~worker[w].noted /\ Free /\ Grant(w)
    /\ NoFault
    /\ UNCHANGED <<locked, producer>>

\* With the row locked before the notes are read.
ClaimLocked(w) ==
    /\ worker[w].at = "looks"
    /\ locked = 0
    /\ \/ Answered(w, worker[w].m \in replaced)
       \/ Busy(w, worker[w].m \in replaced)
       \/ worker[w].m \notin replaced /\ Free /\ Grant(w)
    /\ NoFault
    /\ UNCHANGED <<locked, producer>>

\* The effect with DONE, as its owner; else nothing is written, and the message comes again.
Complete(w) ==
    /\ worker[w].at = "body"
    /\ IF row.state = "PROCESSING" /\ row.owner = w
       THEN /\ row' = [row EXCEPT !.state = "DONE", !.owner = Nobody]
            /\ UNCHANGED <<replaced, copies>>
            /\ Flushed
            /\ history' = [history EXCEPT !.effects = @ + 1]
       ELSE Read /\ copies' = Added(worker[w].m) /\ UNCHANGED history
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ NoFault
    /\ UNCHANGED <<locked, producer>>

Fail(w) ==
    /\ worker[w].at = "body"
    /\ Fault("fails")
    /\ row' = IF row.owner = w THEN [row EXCEPT !.state = "FAILED", !.owner = Nobody] ELSE row
    /\ UNCHANGED replaced
    /\ Flushed
    /\ copies' = Added(worker[w].m)
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ UNCHANGED <<locked, producer, history>>

Step(w) == Claim(w) \/ ClaimDecides(w) \/ ClaimLocked(w) \/ Complete(w)

(***************************************************************************)
(* What else happens.                                                      *)
(***************************************************************************)

Buried(w, r) == [r EXCEPT !.owner = IF @ = w THEN Gone ELSE @]

Crash(w) ==
    /\ worker[w].at # "idle"
    /\ Fault("crash")
    /\ copies' = Added(worker[w].m)
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ row' = Buried(w, row)
    /\ disk' = [disk EXCEPT !.row = Buried(w, @)]
    /\ UNCHANGED <<replaced, locked, producer, history>>

Lose(m) ==
    /\ copies[m] > 0
    /\ m = row.call /\ row.state = "NEW" \* what is at work is the broker's to deliver again
    /\ Fault("loss")
    /\ copies' = [copies EXCEPT ![m] = @ - 1]
    /\ Read
    /\ UNCHANGED <<locked, producer, worker, history>>

Duplicate(m) ==
    /\ InHand(m)
    /\ Fault("twice")
    /\ copies' = Added(m)
    /\ Read
    /\ UNCHANGED <<locked, producer, worker, history>>

DatabaseCrash ==
    /\ Fault("database")
    /\ row' = disk.row /\ replaced' = disk.replaced
    /\ locked' = 0
    /\ producer' = [m \in Messages |-> IF producer[m].at = "open"
                                       THEN [producer[m] EXCEPT !.at = "rolled back"] ELSE producer[m]]
    /\ UNCHANGED <<copies, disk, worker, history>>

\* By a relay, or a sweep, if it does not come.
Relay(m) ==
    /\ row.state = "NEW" /\ row.due /\ row.call = m
    /\ copies[m] = 0 /\ ~InHand(m) /\ producer[m].at # "sends"
    /\ copies' = Added(m)
    /\ Read /\ NoFault
    /\ UNCHANGED <<locked, producer, worker, history>>

Next ==
    \/ \E m \in Messages :
        \/ Decide(m) \/ Commit(m) \/ RollBack(m) \/ Send(m) \/ ProducerDies(m)
        \/ Lose(m) \/ Duplicate(m) \/ Relay(m)
    \/ \E w \in Workers : Step(w) \/ Fail(w) \/ Crash(w) \/ \E m \in Messages : Receive(w, m)
    \/ DatabaseCrash

Spec == Init /\ [][Next]_vars

Fairness ==
    /\ \A m \in Messages : WF_vars(Decide(m)) /\ WF_vars(Commit(m) \/ RollBack(m)) /\ WF_vars(Send(m))
    /\ \A m \in Messages : WF_vars(Relay(m)) /\ SF_vars(\E w \in Workers : Receive(w, m))
    /\ \A w \in Workers : SF_vars(Step(w))

FairSpec == Spec /\ Fairness

(***************************************************************************)
(* What must hold.                                                         *)
(***************************************************************************)

S2 == history.effects <= 1

\* A message whose call was replaced does not begin; who begins has the newest call.
S10 == ~history.outdated

\* What is to be done is due, or on its way, or at work.
S7 == row.state \in {"NEW", "PROCESSING", "FAILED"} =>
    row.due \/ copies[row.call] > 0 \/ InHand(row.call) \/ producer[row.call].at = "sends"

\* What was told is so, also after a crash: who attached has work that stays, and what was rolled back
\* has not begun.
S8 ==
    /\ (\E m \in Messages : producer[m].at = "attached") => disk.row.state # "none"
    /\ \A m \in Messages : producer[m].at = "rolled back" => row.call # m

\* What was committed is done in the end.
L1 == <>(row.state = "DONE" \/ \A m \in Messages : producer[m].at = "rolled back")

Symmetry == Permutations(Workers)
=============================================================================
