----------------------------- MODULE Taskguard -----------------------------
(***************************************************************************)
(* The way of a delivery through the lock server and the database, with    *)
(* what may befall it on the way: leases, fencing tokens, claim, complete, *)
(* deferral.  Invariants have the names that the project gives them.       *)
(*                                                                         *)
(* What is modelled                                                        *)
(*                                                                         *)
(*   One key, which all work shares, because keys do not affect each       *)
(*     other.                                                              *)
(*   The lock server: the holder of the key.  It may forget it at any      *)
(*     time (expiry, eviction, FLUSHALL, failover), and may be bypassed at *)
(*     any time (no answer).  Neither counts as a fault.                   *)
(*   The database: a row for the key, one for each work, and one for the   *)
(*     numbers of each message in its work.  A claim is one conditional    *)
(*     step.  A completion is another one, which includes the effect.      *)
(*   Each work has messages with the same ids: an id may be used twice.    *)
(*   A deploy that changed a guard: workers with the new guard know work   *)
(*     by two ids, decide by the record that counts (`speaking_record()`), *)
(*     and write both.  Workers with the former guard know the former id   *)
(*     alone.  The key is the former one, which both hold.                 *)
(*   The broker: messages that are published and not acknowledged.  A      *)
(*     message that one worker has may be delivered to another worker as   *)
(*     well (visibility timeout), under the same tag, as on Redis: an      *)
(*     acknowledgement by one of them counts for both.                     *)
(*   Deferral: publish the message again, record how often it was          *)
(*     deferred, acknowledge.  Each is one step.  The first two hold the   *)
(*     lock of its row.                                                    *)
(*   Retries: a body that raises leaves FAILED, and the queue publishes    *)
(*     the message with its next retry number before it acknowledges.      *)
(*   Time: a lease is valid until it expires.  The model leaves open when  *)
(*     that is, so no two clocks need to agree.  A live holder renews its  *)
(*     lease.  If the lease expires nevertheless, that is a pause.         *)
(*   A purge of the key's row, at any time after its lease.                *)
(*   Faults, MaxFaults of them, anywhere: a pause beyond the lease, a      *)
(*     crash, a redelivery, a shutdown in the body, or a body that ends    *)
(*     its process; the reply of a claim, of complete or of the recording  *)
(*     of a deferral lost; a crash of the database, with the claims it had *)
(*     not flushed.                                                        *)
(*                                                                         *)
(* What is left out                                                        *)
(*                                                                         *)
(*   Claims of several keys; burials (DEAD), revocation, operators; the    *)
(*   copying of what a worker with the former guard has done;              *)
(*   results, checkpoints; a purge of works and messages; busy policies    *)
(*   other than "retry".                                                   *)
(*   The two halves of the claim in one statement: a claim is atomic here. *)
(*   A hand-over of the lock to its true owner is one step with the claim  *)
(*   that was turned away, a release one step with acknowledging: the lock *)
(*   may be forgotten at any time, which is worse than either.             *)
(*   A clock of the database that goes back; a failover of the database    *)
(*   that loses flushed commits.  What the broker itself loses.            *)
(*   A message is put off at most MaxDeferrals times; one that cannot be   *)
(*   put off any further goes back into the queue, unacknowledged.         *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Workers,    \* each handles one delivery at a time
    Changed,    \* those of them that have the new guard; {} where no deploy changed it
    Works,      \* all of one key
    PerWork,    \* so many messages ask for each work; their ids are 1 to this, whatever the work
    MaxDeferrals, \* so often a message may be put off
    MaxRetries, \* a body may raise while its message has retries left
    MaxFaults,  \* so much goes wrong, at most
    Unflushed,  \* which claims a crash of the database may lose
    Mutant,     \* what is wrong with the design; "none" is the design
    Nobody,     \* the owner of what is free
    Gone        \* the nonce of a delivery that has ended; nonces are not used twice

ASSUME Unflushed \in {
    "none",
    "of free keys", \* claims of a key that its last holder let go itself
    "all"}

ASSUME Mutant \in {
    "none",
    "no fence check",    \* complete names the old state, but neither fence nor owner
    "lost counter",      \* the lock server counts the tokens, and its memory may be lost
    "purged counter",    \* a key whose row was purged begins its fences anew
    "early ack",         \* acknowledged when received, not when committed
    "no nonce",          \* a holder of the same message is taken for the same owner
    "dropped duplicate", \* a duplicate of work in progress is acknowledged without a copy
    "record first",      \* a deferral is recorded before the message is published again
    "numbers by id",     \* one number for all works that a message's id was used for
    "two orders",        \* retries and deferrals are compared apart: see Below
    "former unread",     \* a worker with the new guard looks at its own record alone
    "former unwritten",  \* it looks at both, and writes its own alone
    "no expiry"}         \* leases in the database last until they are released

VARIABLES
    live,    \* <<message, retry, deferrals>>: published and not acknowledged
    record,  \* of each message the last number that was recorded under an id of its work: its
             \* retry, its deferrals
    lock,    \* the holder of the key at the lock server
    counter, \* the lock server's counter of tokens, for the mutant alone
    db,      \* the rows as the database shows them: key, work
    disk,    \* the rows as they are after a crash of the database
    worker,  \* what each worker is at
    faults,  \* that happened so far
    history  \* not part of the system: what the invariants are about

vars == <<live, record, lock, counter, db, disk, worker, faults, history>>

Messages == Works \X (1..PerWork)
Retries == 0..MaxRetries
Deferrals == 0..MaxDeferrals
Deliveries == Messages \X Retries \X Deferrals
WorkOf(message) == message[1]
IdOf(message) == message[2]
Max(a, b) == IF a > b THEN a ELSE b

\* The ids of a work: one for each guard that knows it.
Guards == IF Changed = {} THEN {"former"} ELSE {"former", "new"}
Ids == Works \X Guards
GuardOf(w) == IF w \in Changed THEN "new" ELSE "former"
Own(w, x) == <<x, GuardOf(w)>>
WritesBoth(w) == w \in Changed /\ Mutant # "former unwritten"
Written(w, x) == IF WritesBoth(w) THEN {x} \X Guards ELSE {Own(w, x)}
\* The works' rows after a worker has changed what it writes of one.
After(w, x, change(_)) ==
    LET own == [db.work EXCEPT ![Own(w, x)] = change(@)]
    IN  IF WritesBoth(w) THEN [own EXCEPT ![<<x, "former">>] = change(@)] ELSE own

Idle == [at |-> "idle", message |-> Nobody, retry |-> 0, deferrals |-> 0, token |-> 0, fence |-> 0]

Init ==
    /\ live = Messages \X {0} \X {0}
    /\ record = [m \in Messages \X Guards |-> [retry |-> 0, deferrals |-> 0]]
    /\ lock = Nobody
    /\ counter = 0
    /\ db = [key |-> [fence |-> 0, owner |-> Nobody, leased |-> FALSE],
             work |-> [id \in Ids |->
                 [state |-> "NEW", fence |-> 0, owner |-> Nobody, leased |-> FALSE,
                  message |-> Nobody, retry |-> 0]]]
    /\ disk = db
    /\ worker = [w \in Workers |-> Idle]
    /\ faults = 0
    /\ history = [newest |-> 0,          \* the highest fence that was granted
                  wentBack |-> FALSE,    \* a fence was granted that is not above it
                  behind |-> FALSE,      \* a commit came behind a higher fence
                  effects |-> [x \in Works |-> 0]]

(***************************************************************************)
(* Small parts.                                                            *)
(***************************************************************************)

Fault == faults < MaxFaults /\ faults' = faults + 1
NoFault == UNCHANGED faults

\* The name under which a worker's present delivery owns things.  A nonce is fresh for each
\* delivery; a worker has one delivery at a time, so its own name will do until that ends.
Me(w) == IF Mutant = "no nonce" THEN worker[w].message ELSE w

\* When a delivery ends, what it still owns is owned by a nonce that nobody has.
Forgotten(w, owner) == IF owner = w THEN Gone ELSE owner
Buried(w, rows) ==
    [key |-> [rows.key EXCEPT !.owner = Forgotten(w, @)],
     work |-> [id \in Ids |-> [rows.work[id] EXCEPT !.owner = Forgotten(w, @)]]]

Goto(w, place) == worker' = [worker EXCEPT ![w].at = place]
\* What it was granted is of no use any more.
Leave(w, place) == worker' = [worker EXCEPT ![w].at = place, ![w].token = 0, ![w].fence = 0]

\* The delivery has ended.
Ends(w) ==
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ db' = Buried(w, db)
    /\ disk' = Buried(w, disk)

Read == UNCHANGED <<db, disk>>
\* Whatever is flushed takes all that was written before it along.
Write(rows) == db' = rows /\ disk' = rows
\* The commit returns before it is flushed: on disk is this, what was before, or what was there.
LazyWrite(rows) == db' = rows /\ disk' \in {disk, db, rows}

\* If the row that comes back names an owner, that owner can commit by it, behind the claim that
\* was lost.  A row that was let go names none.  After the last fault no claim is lost.
MayBeLost ==
    CASE Unflushed = "none" \/ faults = MaxFaults -> FALSE
      [] Unflushed = "all" -> TRUE
      [] OTHER -> db.key.owner = Nobody

\* max(fence + 1, the database's clock).  The clock matters where claims may be lost: it is
\* beyond every fence that was ever taken from it.
NextFence(w) ==
    CASE Mutant = "lost counter" -> worker[w].token
      [] Unflushed = "none" -> db.key.fence + 1
      [] OTHER -> Max(db.key.fence, history.newest) + 1

Unlocked(w) == IF lock = Me(w) THEN Nobody ELSE lock

(***************************************************************************)
(* The way of one delivery.                                                *)
(***************************************************************************)

Hand(w) == <<worker[w].message, worker[w].retry, worker[w].deferrals>>
InHand(d) == \E w \in Workers : worker[w].at # "idle" /\ Hand(w) = d

Take(w, d) ==
    /\ worker[w].at = "idle"
    /\ d \in live
    /\ worker' = [worker EXCEPT ![w] =
           [Idle EXCEPT !.at = "admit", !.message = d[1], !.retry = d[2], !.deferrals = d[3]]]
    /\ live' = IF Mutant = "early ack" THEN live \ {d} ELSE live
    /\ Read
    /\ UNCHANGED <<record, lock, counter, history>>

Receive(w, d) == ~InHand(d) /\ Take(w, d) /\ NoFault
Redeliver(w, d) == InHand(d) /\ Take(w, d) /\ Fault

\* The lock server grants the key, says that it is held, or gives no answer.
Admit(w) ==
    /\ worker[w].at = "admit"
    /\ \/ /\ lock \in {Nobody, Me(w)}
          /\ lock' = Me(w)
          /\ counter' = IF Mutant = "lost counter" THEN counter + 1 ELSE counter
          /\ worker' = [worker EXCEPT ![w].at = "claim", ![w].token = counter']
       \/ /\ lock \notin {Nobody, Me(w)}
          /\ Goto(w, "look")
          /\ UNCHANGED <<lock, counter>>
       \/ /\ Mutant # "lost counter"
          /\ Goto(w, "claim")
          /\ UNCHANGED <<lock, counter>>
    /\ Read
    /\ NoFault
    /\ UNCHANGED <<live, record, history>>

\* One order of all deliveries of a message, retries first.  By two orders, of retries and of
\* deferrals, two deliveries can each be below the other, and both are dropped.
Below(retry, deferrals, number) ==
    IF Mutant = "two orders" THEN deferrals < number.deferrals
    ELSE retry < number.retry \/ (retry = number.retry /\ deferrals < number.deferrals)

\* The id of the record that counts: one that is DONE, otherwise the one that was claimed last.
Speaking(w, x) ==
    LET former == db.work[<<x, "former">>]
        own == db.work[Own(w, x)]
        newer == \/ former.state = "DONE" /\ own.state # "DONE"
                 \/ (former.state = "DONE") = (own.state = "DONE") /\ former.fence > own.fence
    IN  IF w \in Changed /\ (Mutant = "former unread" \/ ~newer) THEN "new" ELSE "former"
Row(w, x) == db.work[<<x, Speaking(w, x)>>]

\* The message's number, of both records that are looked at.
Number(w, m) ==
    LET own == record[<<m, GuardOf(w)>>]
        speaking == record[<<m, Speaking(w, WorkOf(m))>>]
    IN  IF w \in Changed /\ Below(own.retry, own.deferrals, speaking) THEN speaking ELSE own

\* Another delivery of the message is known to live, or to have had its turn.
Superseded(w, d) ==
    LET row == Row(w, WorkOf(d[1]))
    IN  (row.message = d[1] /\ d[2] < row.retry) \/ Below(d[2], d[3], Number(w, d[1]))

\* What the rows say to this delivery, in the order of `states.decide()`.
Decision(w) ==
    LET message == worker[w].message
        row == Row(w, WorkOf(message))
    IN  CASE row.state = "PROCESSING" /\ row.owner = Me(w) -> "same"
          [] row.state = "DONE" -> "done"
          [] Superseded(w, Hand(w)) -> "superseded"
          [] row.state # "PROCESSING" -> "claim"
          [] row.leased -> "busy"
          [] OTHER -> "takeover"

KeyIsTaken(w) == db.key.owner # Me(w) /\ db.key.leased

TurnedAway(w) ==
    IF Mutant = "dropped duplicate" /\ Row(w, WorkOf(worker[w].message)).state = "PROCESSING"
    THEN "ack" ELSE "defer"

\* Asked again by the same nonce, the claim is the same; else there is a higher fence.
Granted(w) ==
    IF Decision(w) = "same" /\ db.key.owner = Me(w) THEN db.key.fence ELSE NextFence(w)

Grants(w) ==
    LET fence == Granted(w)
        mine == [fence |-> fence, owner |-> Me(w), leased |-> TRUE]
        row == [state |-> "PROCESSING", message |-> worker[w].message,
                retry |-> worker[w].retry] @@ mine
        rows == [key |-> mine,
                 work |-> After(w, WorkOf(worker[w].message), LAMBDA before : row)]
    IN  /\ Decision(w) \in {"same", "claim", "takeover"} /\ ~KeyIsTaken(w)
        /\ IF Decision(w) = "same" /\ db.key.owner = Me(w) THEN Read
           ELSE IF MayBeLost THEN LazyWrite(rows) ELSE Write(rows)
        /\ history' = [history EXCEPT
               !.newest = Max(@, fence),
               !.wentBack = @ \/ (fence # worker[w].fence /\ fence <= history.newest)]

Claim(w) ==
    /\ worker[w].at = "claim"
    /\ \/ /\ Grants(w)
          /\ worker' = [worker EXCEPT ![w].at = "body", ![w].fence = Granted(w)]
          /\ UNCHANGED lock
       \/ /\ Decision(w) \in {"done", "superseded"}
          /\ Leave(w, "ack")
          /\ Read
          /\ UNCHANGED <<lock, history>>
       \/ \* Busy: the true owner gets the lock that the lock server forgot.
          /\ Decision(w) \notin {"done", "superseded"}
          /\ Decision(w) = "busy" \/ KeyIsTaken(w)
          /\ Leave(w, TurnedAway(w))
          /\ lock' = IF lock = Me(w) THEN db.key.owner ELSE lock
          /\ Read
          /\ UNCHANGED history
    /\ NoFault
    /\ UNCHANGED <<live, record, counter>>

\* Granted, but the worker does not learn it: it asks again.
ClaimReplyLost(w) ==
    /\ worker[w].at = "claim"
    /\ Grants(w)
    /\ worker' = [worker EXCEPT ![w].fence = Granted(w)]
    /\ Fault
    /\ UNCHANGED <<live, record, lock, counter>>

Mine(w, row) == row.owner = Me(w) /\ row.fence = worker[w].fence
IsProcessing(w) ==
    \A id \in Written(w, WorkOf(worker[w].message)) : db.work[id].state = "PROCESSING"
WorkStands(w) ==
    IsProcessing(w) /\ \A id \in Written(w, WorkOf(worker[w].message)) : Mine(w, db.work[id])
Stands(w) ==
    IF Mutant = "no fence check" THEN IsProcessing(w) ELSE WorkStands(w) /\ Mine(w, db.key)

\* The effect and DONE, in one transaction.
Commits(w) ==
    LET x == WorkOf(worker[w].message)
    IN  /\ worker[w].at = "body"
        /\ Stands(w)
        /\ Write([key |-> [db.key EXCEPT !.owner = Nobody, !.leased = FALSE],
                  work |-> After(w, x, LAMBDA row :
                      [row EXCEPT !.state = "DONE", !.leased = FALSE])])
        /\ history' = [history EXCEPT
               !.effects[x] = @ + 1,
               !.behind = @ \/ worker[w].fence < history.newest]
        /\ UNCHANGED <<live, record, lock, counter>>

Complete(w) == Commits(w) /\ Leave(w, "ack") /\ NoFault

\* Committed, but the worker does not learn it: it looks (Resolve).
CompleteReplyLost(w) == Commits(w) /\ UNCHANGED worker /\ Fault

\* Nothing is left to complete: this claim has completed it, or the claim is stale.
Resolve(w) ==
    LET row == db.work[Own(w, WorkOf(worker[w].message))]
        mine == row.state = "DONE" /\ Mine(w, row)
    IN  /\ worker[w].at = "body"
        /\ ~Stands(w)
        /\ IF mine THEN Leave(w, "ack") ELSE Goto(w, "end")
        /\ Read
        /\ NoFault
        /\ UNCHANGED <<live, record, lock, counter, history>>

\* What is still ours in the database ends; so does the lease.
EndsAs(w, state) ==
    LET ended(row) == [row EXCEPT !.owner = Nobody, !.leased = FALSE]
    IN  [key |-> IF Mine(w, db.key) THEN ended(db.key) ELSE db.key,
         work |-> IF WorkStands(w)
                  THEN After(w, WorkOf(worker[w].message), LAMBDA row :
                           [ended(row) EXCEPT !.state = state])
                  ELSE db.work]

End(w) ==
    /\ worker[w].at = "end"
    /\ Write(EndsAs(w, "NEW"))
    /\ lock' = Unlocked(w)
    /\ Leave(w, "look")
    /\ NoFault
    /\ UNCHANGED <<live, record, counter, history>>

\* The body raises, and the queue tries again: the retry is published, then this is acknowledged.
Fail(w) ==
    /\ worker[w].at = "body"
    /\ worker[w].retry < MaxRetries
    /\ Write(EndsAs(w, "FAILED"))
    /\ lock' = Unlocked(w)
    /\ Leave(w, "retry")
    /\ NoFault
    /\ UNCHANGED <<live, record, counter, history>>

Retry(w) ==
    /\ worker[w].at = "retry"
    /\ live' = live \union {<<worker[w].message, worker[w].retry + 1, worker[w].deferrals>>}
    /\ Leave(w, "ack")
    /\ Read
    /\ NoFault
    /\ UNCHANGED <<record, lock, counter, history>>

\* The record answers, or the delivery is put off.
Look(w) ==
    /\ worker[w].at = "look"
    /\ Goto(w, IF Decision(w) \in {"done", "superseded"} THEN "ack" ELSE TurnedAway(w))
    /\ Read
    /\ NoFault
    /\ UNCHANGED <<live, record, lock, counter, history>>

\* The messages whose numbers are in one row with this one's.
RowOf(message) ==
    IF Mutant = "numbers by id" THEN {m \in Messages : IdOf(m) = IdOf(message)} ELSE {message}

RowIsLocked(w) ==
    \E v \in Workers \ {w} :
        /\ worker[v].at = "record"
        /\ GuardOf(v) = GuardOf(w)
        /\ worker[v].message \in RowOf(worker[w].message)

\* Somebody recorded this delivery's next number, or a higher one.
Recorded(w) ==
    LET number == record[<<worker[w].message, GuardOf(w)>>]
        next == [retry |-> worker[w].retry, deferrals |-> worker[w].deferrals + 1]
    IN  ~Below(number.retry, number.deferrals, next)

Publishes(w) ==
    live' = live \union {<<worker[w].message, worker[w].retry, worker[w].deferrals + 1>>}
Records(w) ==
    record' = [m \in RowOf(worker[w].message) \X {GuardOf(w)} |->
        [retry |-> worker[w].retry, deferrals |-> worker[w].deferrals + 1]] @@ record

Defer(w) ==
    /\ worker[w].at = "defer"
    /\ ~RowIsLocked(w)
    /\ \/ /\ Recorded(w)
          /\ Goto(w, "ack")
          /\ Read
          /\ UNCHANGED <<live, record, lock>>
       \/ /\ ~Recorded(w)
          /\ worker[w].deferrals < MaxDeferrals
          /\ IF Mutant = "record first" THEN Records(w) /\ UNCHANGED live
                                        ELSE Publishes(w) /\ UNCHANGED record
          /\ Goto(w, "record")
          /\ Read
          /\ UNCHANGED lock
       \/ /\ ~Recorded(w)
          /\ worker[w].deferrals = MaxDeferrals
          /\ lock' = Unlocked(w)
          /\ Ends(w)
          /\ UNCHANGED <<live, record>>
    /\ NoFault
    /\ UNCHANGED <<counter, history>>

Record(w) ==
    /\ worker[w].at = "record"
    /\ IF Mutant = "record first" THEN Publishes(w) /\ UNCHANGED record
                                  ELSE Records(w) /\ UNCHANGED live
    /\ Goto(w, "ack")
    /\ Write(db)
    /\ NoFault
    /\ UNCHANGED <<lock, counter, history>>

\* The database is away: the message is published again, which is not on record.
RecordLost(w) ==
    /\ worker[w].at = "record"
    /\ Mutant # "record first"
    /\ Goto(w, "ack")
    /\ Read
    /\ Fault
    /\ UNCHANGED <<live, record, lock, counter, history>>

Acknowledge(w) ==
    /\ worker[w].at = "ack"
    /\ live' = live \ {Hand(w)}
    /\ lock' = Unlocked(w)
    /\ Ends(w)
    /\ NoFault
    /\ UNCHANGED <<record, counter, history>>

Step(w) ==
    \/ Admit(w) \/ Claim(w) \/ Complete(w) \/ Resolve(w) \/ End(w)
    \/ Fail(w) \/ Retry(w) \/ Look(w) \/ Defer(w) \/ Record(w) \/ Acknowledge(w)

(***************************************************************************)
(* What else happens.                                                      *)
(***************************************************************************)

\* The worker dies; the broker keeps what it had in hand.
Crash(w) ==
    /\ worker[w].at # "idle"
    /\ lock' = Forgotten(w, lock)
    /\ Ends(w)
    /\ Fault
    /\ UNCHANGED <<live, record, counter, history>>

\* A signal stops the worker: its body is interrupted, and the work is NEW again.
Shutdown(w) ==
    /\ worker[w].at = "body"
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ Write(Buried(w, EndsAs(w, "NEW")))
    /\ lock' = Unlocked(w)
    /\ Fault
    /\ UNCHANGED <<live, record, counter, history>>

\* The body ends its process: the work stays PROCESSING, without a lease, and is taken over.
Exit(w) ==
    /\ worker[w].at = "body"
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ Write(Buried(w, EndsAs(w, "PROCESSING")))
    /\ lock' = Unlocked(w)
    /\ Fault
    /\ UNCHANGED <<live, record, counter, history>>

\* The lease of a claim, on the row of its key and on that of its work, is over.
Expired(fence, rows) ==
    [key |-> [rows.key EXCEPT !.leased = @ /\ rows.key.fence # fence],
     work |-> [id \in Ids |->
         [rows.work[id] EXCEPT !.leased = @ /\ rows.work[id].fence # fence]]]

Expires ==
    /\ db.key.leased
    /\ db' = Expired(db.key.fence, db)
    /\ disk' = Expired(db.key.fence, disk)
    /\ UNCHANGED <<live, record, lock, counter, worker, history>>

Expire == db.key.owner = Gone /\ Mutant # "no expiry" /\ Expires /\ NoFault
Pause == db.key.owner # Gone /\ Expires /\ Fault

\* The key's row is purged after its lease, with any owner.  The next claim makes it
\* anew, with a fence by the clock: beyond every fence that was granted before the cut-off.
Purge ==
    /\ ~db.key.leased
    /\ db.key.owner # Nobody
    /\ Write([db EXCEPT !.key.owner = Nobody,
                        !.key.fence = IF Mutant = "purged counter" THEN 0 ELSE @])
    /\ NoFault
    /\ UNCHANGED <<live, record, lock, counter, worker, history>>

\* The lock server forgets the owner: its lease ran out, or the memory is gone.
Forget ==
    /\ lock # Nobody
    /\ lock' = Nobody
    /\ counter' \in {counter, 0}
    /\ NoFault
    /\ UNCHANGED <<live, record, db, disk, worker, history>>

\* The database comes back with what it had flushed.
DatabaseCrash ==
    /\ db # disk
    /\ db' = disk
    /\ Fault
    /\ UNCHANGED <<live, record, lock, counter, disk, worker, history>>

Next ==
    \/ \E w \in Workers :
        \/ Step(w) \/ Crash(w) \/ Shutdown(w) \/ Exit(w)
        \/ ClaimReplyLost(w) \/ CompleteReplyLost(w) \/ RecordLost(w)
        \/ \E d \in live : Receive(w, d) \/ Redeliver(w, d)
    \/ Expire \/ Pause \/ Purge \/ Forget \/ DatabaseCrash

Spec == Init /\ [][Next]_vars

\* Once nothing goes wrong any more: workers go on, the lease of a dead holder ends, the broker
\* delivers what nobody has in hand.
Fairness ==
    /\ \A w \in Workers : WF_vars(Step(w))
    /\ \A d \in Deliveries : SF_vars(\E w \in Workers : Receive(w, d))
    /\ WF_vars(Expire)
    /\ WF_vars(lock = Gone /\ Forget)

FairSpec == Spec /\ Fairness

(***************************************************************************)
(* What must hold.                                                         *)
(***************************************************************************)

IsDone(x) == \E g \in Guards : db.work[<<x, g>>].state = "DONE"

\* Every claim of the key has a fence above all that were granted before.
S1 == ~history.wentBack

\* At most one committed effect for a work.
S2 == \A x \in Works : history.effects[x] <= 1

\* No commit behind a claim with a higher fence.
S3 == ~history.behind

\* DONE absorbs, and it means that the effect is committed.
S6 == [][\A id \in Ids : db.work[id].state = "DONE" => db.work[id].state' = "DONE"]_vars
S6Effect == \A x \in Works : IsDone(x) => history.effects[x] > 0

\* The fence column never goes back.
S6Fence == [][db.key.fence' >= db.key.fence]_vars

\* A message is only acknowledged if its work is DONE or it lives on in a delivery that nothing
\* supersedes, with any worker.
S7 == \A m \in Messages :
    \/ IsDone(WorkOf(m))
    \/ \E d \in live : d[1] = m /\ \A w \in Workers : ~Superseded(w, d)

\* Every accepted message's work is DONE in the end.
L1 == <>(\A x \in Works : IsDone(x))

\* When quiet, nothing is left behind: no message, no lock, no lease.
L4 == <>[](live = {} /\ lock = Nobody /\ ~db.key.leased)

Symmetry == (IF Changed = {} THEN Permutations(Workers) ELSE {}) \union Permutations(Works)
=============================================================================
