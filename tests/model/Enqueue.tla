------------------------------ MODULE Enqueue ------------------------------
(***************************************************************************)
(* Messages that enqueue(duplicate="attach") and                           *)
(* enqueue(duplicate="replace") store for one work, in transactions, and   *)
(* the faults until the work is DONE.  Line.tla models lines.              *)
(* Taskguard.tla models leases and fencing tokens.  Invariants have the    *)
(* names of docs/architecture.md.                                          *)
(*                                                                         *)
(* What is modelled                                                        *)
(*                                                                         *)
(*   One work, one ledger, one broker.  Each message is enqueued once, or  *)
(*     again if its COMMIT gets no answer, in any order.  The messages of  *)
(*     Attaching attach, the others replace.                               *)
(*   A transaction that writes the work locks its row until it commits or  *)
(*     is rolled back, by its user or a crash of the database.  Others     *)
(*     read the committed row.  The producer sends the message after       *)
(*     COMMIT.  An enqueue that attaches neither writes nor locks.         *)
(*   The COMMIT succeeds and its answer is lost: the producer enqueues the *)
(*     message again.  If another message has replaced it meanwhile, the   *)
(*     repeated enqueue writes nothing.  If it is rolled back, the         *)
(*     producer does not know whether the message is enqueued.             *)
(*   The row: its state, the message whose call it has, its owner.  NEW    *)
(*     work with a call is due: a relay sends its message if no copy is on *)
(*     its way.  A claim is not flushed: a crash of the database may undo  *)
(*     it.  An enqueue that replaces a message notes that message beside   *)
(*     the row, in its transaction.                                        *)
(*   A claim: one statement, which reads those notes when it begins, and   *)
(*     then waits for the row.  If the row has another message by then,    *)
(*     the statement decides nothing.  A second statement locks the row,   *)
(*     and then reads the notes.                                           *)
(*   A body that fails is retried: its message comes again.                *)
(*   Faults, at most MaxFaults: a worker dies, and the broker delivers its *)
(*     message again; a message is lost, or delivered twice; a producer    *)
(*     dies after COMMIT, or its COMMIT gets no answer; the database       *)
(*     crashes; a body fails.                                              *)
(*                                                                         *)
(* What is left out                                                        *)
(*                                                                         *)
(*   Deferrals: a message that finds the work in progress goes back to the *)
(*     broker.                                                             *)
(*   More than one work or ledger.                                         *)
(*   An enqueue that attaches to FAILED work, and becomes its message.     *)
(*   A lease ends only after its holder has died.                          *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Workers,
    Last,       \* the number of the last message
    Attaching,  \* the messages that attach
    Fates,      \* which faults there are
    MaxFaults,
    Mutant,     \* the mistake in the design; "none" is the design
    Free,       \* no owner
    Dead        \* an owner that has died

ASSUME Fates \subseteq {"crash", "loss", "twice", "producer", "answer", "database", "fails"}

ASSUME Mutant \in {
    "none",
    "read before",           \* the claim in one statement decides by the notes that it has read
    "replaced forgotten",    \* an enqueue does not note the message that it replaces
    "repeated replaces",     \* a repeated enqueue of a replaced message replaces the newer one
    "attached unseen",       \* an enqueue attaches to work that is not committed
    "sent before",           \* a message is sent before its COMMIT
    "not due"}               \* committed work is not due: its producer is relied on to send it

VARIABLES
    copies,    \* how many copies of each message are in the broker
    row,       \* of the work: its state, its message, its owner, whether it is due
    replaced,  \* the messages that were replaced
    disk,      \* row and replaced as they are after a crash of the database
    locked,    \* the message whose transaction has locked the row, or 0
    producer,  \* the step of each message's enqueue, the row that it commits, the message that it replaces
    worker,
    faults,
    history    \* how many effects there are, and whether a replaced message has begun

vars == <<copies, row, replaced, disk, locked, producer, worker, faults, history>>

Messages == 1..Last
Empty == [state |-> "none", call |-> 0, owner |-> Free, due |-> FALSE]
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
\* What a crash of the database would undo matters only if one may still come.
Unflushed ==
    IF "database" \in Fates /\ faults < MaxFaults THEN disk' \in {disk, [row |-> row', replaced |-> replaced']} ELSE Flushed
Read == UNCHANGED <<row, replaced, disk>>

(***************************************************************************)
(* Enqueueing.                                                             *)
(***************************************************************************)

Attaches(m) == m \in Attaching
At(m, place) == producer' = [producer EXCEPT ![m].at = place]

\* The enqueue reads the committed row. If another transaction has locked the row, it waits until that
\* has ended.
Decide(m) ==
    LET own == row.call = m
        outdated == m \in replaced /\ Mutant # "repeated replaces"
        replaces == ~Attaches(m) /\ ~outdated
    IN
    /\ producer[m].at = "begins"
    /\ \/ /\ row.state = "none" \/ (replaces /\ row.state \in {"NEW", "FAILED"})
          /\ locked = 0
          /\ locked' = m
          /\ producer' = [producer EXCEPT ![m] = [
                 at |-> "open",
                 row |-> [row EXCEPT !.state = "NEW", !.call = m, !.due = Mutant # "not due"],
                 older |-> IF own THEN 0 ELSE row.call]]
          /\ copies' = IF Mutant = "sent before" THEN Added(m) ELSE copies
       \/ /\ Attaches(m) /\ ~own /\ row.state \in {"NEW", "PROCESSING"}
          /\ At(m, "attached")
          /\ UNCHANGED <<copies, locked>>
       \/ /\ Attaches(m) /\ row.state = "none" /\ locked # 0 /\ Mutant = "attached unseen"
          /\ At(m, "attached")
          /\ UNCHANGED <<copies, locked>>
       \/ /\ replaces /\ ~own /\ row.state = "PROCESSING"
          /\ At(m, "refused")
          /\ UNCHANGED <<copies, locked>>
       \* The enqueue writes nothing. The message is answered, or its work is on record.
       \/ /\ \/ row.state = "DONE"
             \/ ~Attaches(m) /\ outdated
             \/ own /\ (Attaches(m) \/ row.state = "PROCESSING")
          /\ At(m, "sends")
          /\ UNCHANGED <<copies, locked>>
    /\ Read /\ NoFault
    /\ UNCHANGED <<worker, history>>

\* If the answer is lost, the producer begins again.
Commit(m) ==
    /\ producer[m].at = "open"
    /\ row' = producer[m].row
    /\ replaced' = IF producer[m].older = 0 \/ Mutant = "replaced forgotten" THEN replaced
                   ELSE replaced \cup {producer[m].older}
    /\ Flushed
    /\ locked' = 0
    /\ \/ At(m, "sends") /\ NoFault
       \/ At(m, "begins") /\ Fault("answer")
    /\ UNCHANGED <<copies, worker, history>>

\* Its message is on record if an earlier COMMIT of it succeeded.
AfterRollBack(m) == IF row.call = m \/ m \in replaced THEN "unknown" ELSE "rolled back"

\* By its user.
RollBack(m) ==
    /\ producer[m].at = "open"
    /\ locked' = 0
    /\ At(m, AfterRollBack(m))
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

IsFree ==
    \/ row.state \in {"none", "NEW", "FAILED"}
    \/ row.state = "PROCESSING" /\ row.owner = Dead

Grant(w) ==
    /\ row' = [row EXCEPT !.state = "PROCESSING", !.owner = w, !.due = FALSE,
                          !.call = IF @ = 0 THEN worker[w].m ELSE @]
    /\ UNCHANGED replaced
    /\ Unflushed
    /\ Goto(w, "body")
    /\ history' = [history EXCEPT !.outdated = @ \/ worker[w].m \in replaced
                                                 \/ row.call \notin {0, worker[w].m}]
    /\ UNCHANGED copies

\* The message was replaced, or the work is DONE: the delivery is answered, and acknowledged.
Answered(w, noted) ==
    /\ noted \/ row.state = "DONE"
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ UNCHANGED <<row, replaced, disk, copies, history>>

\* The work is in progress: the message comes again.
Busy(w, noted) ==
    /\ ~noted /\ row.state = "PROCESSING" /\ row.owner # Dead
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
            \/ ~worker[w].noted /\ IsFree /\ Grant(w)
    /\ NoFault
    /\ UNCHANGED <<locked, producer>>

\* The second statement locks the row before it reads the notes.
ClaimLocked(w) ==
    /\ worker[w].at = "looks"
    /\ locked = 0
    /\ \/ Answered(w, worker[w].m \in replaced)
       \/ Busy(w, worker[w].m \in replaced)
       \/ worker[w].m \notin replaced /\ IsFree /\ Grant(w)
    /\ NoFault
    /\ UNCHANGED <<locked, producer>>

\* The owner writes the effect with DONE. Another delivery writes nothing, and its message comes again.
Complete(w) ==
    /\ worker[w].at = "body"
    /\ IF row.state = "PROCESSING" /\ row.owner = w
       THEN /\ row' = [row EXCEPT !.state = "DONE", !.owner = Free]
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
    /\ row' = IF row.owner = w THEN [row EXCEPT !.state = "FAILED", !.owner = Free] ELSE row
    /\ UNCHANGED replaced
    /\ Flushed
    /\ copies' = Added(worker[w].m)
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ UNCHANGED <<locked, producer, history>>

Step(w) == Claim(w) \/ ClaimDecides(w) \/ ClaimLocked(w) \/ Complete(w)

(***************************************************************************)
(* Faults and the relay.                                                   *)
(***************************************************************************)

Buried(w, r) == [r EXCEPT !.owner = IF @ = w THEN Dead ELSE @]

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
    /\ m = row.call /\ row.state = "NEW" \* the broker delivers a message again that a worker has
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
                                       THEN [producer[m] EXCEPT !.at = AfterRollBack(m)] ELSE producer[m]]
    /\ UNCHANGED <<copies, disk, worker, history>>

\* A relay, or a sweep, sends a message that is due.
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
(* Invariants and liveness.                                                *)
(***************************************************************************)

S2 == history.effects <= 1

\* A replaced message does not begin. A message that begins is the newest.
S10 == ~history.outdated

\* Unfinished work has a message that was not replaced. It is due, on its way, or in a worker's hands.
S7 == row.state \in {"NEW", "PROCESSING", "FAILED"} =>
    /\ row.call \notin replaced
    /\ row.due \/ copies[row.call] > 0 \/ InHand(row.call) \/ producer[row.call].at = "sends"

\* Each report to a producer is true, even after a crash: work to which a message has attached is on
\* record, and no message begins whose enqueue was rolled back.
S8 ==
    /\ (\E m \in Messages : producer[m].at = "attached") => disk.row.state # "none"
    /\ \A m \in Messages : producer[m].at = "rolled back" => row.call # m

\* Committed work ends.
L1 == <>(row.state = "DONE" \/ \A m \in Messages : producer[m].at = "rolled back")

Symmetry == Permutations(Workers)
=============================================================================
