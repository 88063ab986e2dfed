-------------------------------- MODULE Line --------------------------------
(***************************************************************************)
(* Messages that wait in the ledger for their key (busy="park", "latest",  *)
(* "supersede"): parking, promotion, the claim that checks the line, and   *)
(* the faults in between.  Taskguard.tla models leases, fencing tokens and *)
(* effects.  Here a granted claim is the only holder.  Invariants have the *)
(* names of docs/architecture.md.                                          *)
(*                                                                         *)
(* What is modelled                                                        *)
(*                                                                         *)
(*   Several keys, one lock server, one ledger.  Each message is work of   *)
(*     its own, for one key.  Messages were sent in the order of their     *)
(*     numbers, and that is their order in the line.  With ranks, even     *)
(*     numbers go first.                                                   *)
(*   Each key has Slots.  A holder has one of them, in the ledger and at   *)
(*     the lock server.  One slot is the key itself.                       *)
(*   The ledger has the holders of each key, and a record of each message: *)
(*     its state, its state in the line, and whether it is late.  Their    *)
(*     names and Transitions are those of taskguard/model/line_states.py.  *)
(*     Each step on the ledger is one transaction.  A promotion is not     *)
(*     flushed: a crash of the database may undo it.                       *)
(*   A delivery acquires the key at the lock server, then claims it.  The  *)
(*     claim is refused if an earlier message waits or is expected.  After *)
(*     its body it completes, releases the key, promotes the next message, *)
(*     sends it, and acknowledges its own.  A refused delivery parks its   *)
(*     message.  Then it probes the lock: it acquires and releases it.  If *)
(*     the lock was free, it promotes the next message.                    *)
(*   With Hints a parked message leaves a hint at the lock server, which   *)
(*     answers whether the key is free.  A release takes the hint.         *)
(*     Without one, a first delivery promotes no message.  With one, the   *)
(*     lock server reserves the key for the promoted message for a moment. *)
(*     If no message is promoted, the key is given back.                   *)
(*   The broker has the copies of each message that no worker has in hand. *)
(*     If a worker dies, the broker delivers its message again.            *)
(*   With Rated each start shuts its key.  Later the key opens soon: then  *)
(*     a message is promoted, and may arrive too early.  Then it is open.  *)
(*   With Strict a message keeps its position from its start until it has  *)
(*     ended, over retries and deaths.  Its body may fail: its queue sends *)
(*     a retry, or gives up.  Messages of Enqueued have a position from    *)
(*     the COMMIT that stores them.                                        *)
(*   With Newest a newer message supersedes older ones: those that wait,   *)
(*     and with "supersede" also the holder.  A superseded message that    *)
(*     waited is sent again, so that its caller is notified.               *)
(*   Messages of Mortal expire at any moment.  A worker that gets an       *)
(*     expired message ends its work, and promotes the next message.       *)
(*   Chains: the delivery that answers a message of Chained sends the next *)
(*     message before it acknowledges its own.                             *)
(*   The relay promotes messages of free keys.  It sends messages again    *)
(*     that did not arrive, and messages that expired while they waited.   *)
(*   Faults, at most MaxFaults: a worker or the relay dies; a body fails;  *)
(*     the lock server forgets everything; a sent message is lost in the   *)
(*     broker or before it; a message is delivered twice; the database     *)
(*     crashes.                                                            *)
(*                                                                         *)
(* What is left out                                                        *)
(*                                                                         *)
(*   Failed bodies and retries of lines that are not strict; deferrals;    *)
(*   several messages of one work (Enqueue.tla); the second for which a    *)
(*   promoted message waits for the lock server; a lock server that gives  *)
(*   no answer.  A lease ends only after its holder has died.              *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Workers,
    Last,       \* the number of the last message
    Keys,       \* how many keys they have, in turn
    Slots,      \* how many deliveries may hold a key at once
    Ranked,     \* whether even messages go first
    Hints,      \* whether the lock server keeps hints
    Rated,      \* whether a start shuts its key for a while
    Strict,     \* whether a message keeps its position until it has ended
    Newest,     \* "no", "latest" or "supersede"
    Enqueued,   \* the messages that enqueue() stores
    Mortal,     \* the messages that may expire
    Chained,    \* the messages that the next message follows
    Relay,      \* whether there is a relay
    Fates,      \* which faults there are
    MaxFaults,
    Mutant,     \* the mistake in the design; "none" is the design
    Free,       \* no holder
    Dead,       \* a holder that has died
    Reserved    \* the lock server reserves the key for a promoted message

ASSUME Fates \subseteq {"crash", "failure", "flush", "loss", "twice", "database"}
ASSUME Hints => Slots = 1 /\ ~Rated /\ Newest # "supersede"
ASSUME Strict => Slots = 1 /\ ~Ranked /\ Newest = "no"
ASSUME Enqueued # {} => Strict
ASSUME Newest \in {"no", "latest", "supersede"} /\ (Newest # "no" => Slots = 1 /\ ~Ranked)

ASSUME Mutant \in {
    "none",
    "no look after parking",     \* a parked message relies on the holder to promote it
    "no look after release",     \* a holder that releases the key promotes no message
    "no look after answer",      \* nor does a holder that finds its work done
    "no probe",                  \* a delivery that found the lock held does not check it again after parking
    "probe kept",                \* a probe does not release the lock
    "stays promoted",            \* a promoted message that is parked again stays promoted
    "line ignored",              \* a claim does not check the line
    "rank ignored",              \* promotions and claims ignore ranks
    "all promoted",              \* the next message is promoted while another one is expected
    "hint late",                 \* a parked message leaves its hint after the check of the lock
    "forgotten trusted",         \* a holder whose lock was forgotten believes that there was no hint
    "waited ignored",            \* so does a first delivery of a message that waited
    "ended trusted",             \* a lock that is handed over to a holder that has ended is not released
    "reserved for none",         \* a reserved key is not given back if no message was promoted
    "reserved from all",         \* a promoted message does not get the key that is reserved for it
    "too early charged",         \* a delivery that is too early shuts the key again
    "expired and gone",          \* a delivery of an expired message promotes no message
    "reserved for the expired",  \* nor does it give back the key that is reserved for its message
    "expired and promoted",      \* nor does it end the work
    "parked answered",           \* a parked message sends the one that follows it
    "answered and gone",         \* a delivery that finds its work done does not send it
    "kept ignored",              \* a claim does not check for strict work that has not ended
    "gave up and gone",          \* a delivery whose strict work failed for good promotes no message
    "retry not charged",         \* a retry does not count as a start of its key
    "mark ignored",              \* a claim does not check whether a newer message has begun
    "both wait",                 \* a message that is parked supersedes no older one that waits
    "superseded untold",         \* no message notifies the caller of superseded work that waited
    "taken too early",           \* a newer message takes the key before it is open
    "early ack",                 \* a message is acknowledged before its record is committed
    "unflushed park"}            \* or before the record is flushed

VARIABLES
    copies,  \* how many copies of each message and kind are in the broker
    lock,    \* the holder of each key at the lock server
    hint,    \* whether the lock server has a hint for a key
    held,    \* the holder of each key in the ledger
    row,     \* the record of each message
    disk,    \* held and row, as they are after a crash of the database
    worker,  \* the step of each worker, its message, and the messages that it is to send
    relay,   \* the message that the relay is to send, or 0
    faults,
    history,
    time     \* which messages have expired; whether a key is shut: "no", opens "soon", or "long"

vars == <<copies, lock, hint, held, row, disk, worker, relay, faults, history, time>>

Messages == 1..Last
KeyOf(m) == m % Keys
AllKeys == {KeyOf(m) : m \in Messages}
AllSlots == AllKeys \X (1..Slots)
RankOf(m) == IF Ranked THEN m % 2 ELSE 0
Before(o, m) == RankOf(o) < RankOf(m) \/ (RankOf(o) = RankOf(m) /\ o < m)

\* What a delivery knows about its message: it was promoted, or it was delivered before. Otherwise
\* it is new, even if it is one of two deliveries.
Kinds == {"new", "promoted", "redelivered"}

Idle == [at |-> "idle", m |-> 0, kind |-> "new", known |-> FALSE, looks |-> 0,
         send |-> 0, tell |-> 0, owner |-> Free, slot |-> 1, then |-> FALSE]

Looks == 2 \* how often a key is given back, because other deliveries may leave hints again and again

Added(m, kind) == [copies EXCEPT ![<<m, kind>>] = @ + 1]
InBroker(m) == \E kind \in Kinds : copies[<<m, kind>>] > 0
\* Without hints a redelivery does what a first delivery does.
Again == IF Hints THEN "redelivered" ELSE "new"
Back(w) == Added(worker[w].m, IF worker[w].kind = "promoted" THEN "promoted" ELSE Again)

Unknown == [state |-> "-", line |-> "-", late |-> FALSE] \* of a message that is not on record

Init ==
    /\ copies = [c \in Messages \X Kinds |->
           IF c[2] = "new" /\ c[1] - 1 \notin Chained /\ c[1] \notin Enqueued THEN 1 ELSE 0]
    /\ lock = [k \in AllSlots |-> Free]
    /\ hint = [k \in AllKeys |-> FALSE]
    /\ held = [k \in AllSlots |-> Free]
    /\ row = [m \in Messages |-> Unknown]
    /\ disk = [held |-> held, row |-> row]
    /\ worker = [w \in Workers |-> Idle]
    /\ relay = 0
    /\ faults = 0
    /\ history = [overtaken |-> FALSE, early |-> FALSE, told |-> {}]
    /\ time = [expired |-> {}, shut |-> [k \in AllKeys |-> "no"]]

(***************************************************************************)
(* The records.                                                            *)
(***************************************************************************)

\* Old states, event, and new state in the line; "-" is NULL. test_line_states.py compares them with
\* taskguard/model/line_states.py.
Transitions == UNION {
    {"-"} \X {"enqueue"} \X {"kept"},
    {"-", "waiting", "promoted", "resent", "expired", "kept"} \X {"park"} \X {"waiting"},
    {"waiting"} \X {"promote"} \X {"promoted"},
    {"waiting"} \X {"promote"} \X {"kept"},
    {"waiting"} \X {"expire"} \X {"expired"},
    {"promoted", "resent", "expired"} \X {"send again"} \X {"resent"},
    {"kept"} \X {"send again"} \X {"kept"},
    {"superseded"} \X {"send again"} \X {"superseded"},
    {"kept"} \X {"unsend"} \X {"waiting"},
    {"waiting", "promoted", "resent", "expired"} \X {"claim"} \X {"-"},
    {"-", "waiting", "kept"} \X {"claim"} \X {"kept"},
    {"kept"} \X {"keep"} \X {"kept"},
    {"waiting", "promoted", "resent"} \X {"supersede"} \X {"superseded"},
    {"superseded"} \X {"notify"} \X {"-"},
    {"kept"} \X {"leave"} \X {"-"},
    {"waiting", "promoted", "resent", "expired", "kept"} \X {"end"} \X {"-"}}

\* The record after an event. Work that stays in its state makes no transition.
After(m, event, line, state) ==
    IF row[m].line = line \/ Assert(<<row[m].line, event, line>> \in Transitions, <<row[m].line, event, line>>)
    THEN [state |-> state, line |-> line, late |-> FALSE]
    ELSE row[m]

Is(m, state) == row[m].state = state
Waiting(m) == row[m].line = "waiting"
Keeps(m) == row[m].line = "kept"
Expected(m) == row[m].line = "promoted" /\ ~row[m].late
InLine(m) == row[m].line \notin {"-", "superseded"}
\* Its message is stored, and no claim was granted since.
StandsInLine(m) == InLine(m) /\ ~Is(m, "PROCESSING")
\* A delivery of it is answered from the record.
Ended(m) == Is(m, "DONE") \/ (Is(m, "FAILED") /\ ~Keeps(m))

(***************************************************************************)
(* Small parts.                                                            *)
(***************************************************************************)

Fault(kind) == kind \in Fates /\ faults < MaxFaults /\ faults' = faults + 1
NoFault == UNCHANGED faults

K(w) == <<KeyOf(worker[w].m), worker[w].slot>> \* the slot that a worker's delivery wants, or holds
Taken(k, slots) == {i \in 1..Slots : slots[<<k, i>>] # Free}
Goto(w, place) == worker' = [worker EXCEPT ![w].at = place]

Flushed == disk' = [held |-> held', row |-> row']
\* What a crash of the database would undo matters only if one may still come.
Unflushed ==
    IF "database" \in Fates /\ faults < MaxFaults THEN disk' \in {disk, [held |-> held', row |-> row']} ELSE Flushed
Read == UNCHANGED <<held, row, disk>>

\* A message without a position goes behind all others of its rank.
GoesBefore(o, m) ==
    IF InLine(m) THEN Before(o, m) ELSE RankOf(o) <= RankOf(m)
Blocks(o) == Waiting(o) \/ Expected(o) \/ Keeps(o)
Room(m) == Slots - Cardinality(Taken(KeyOf(m), held))
Others(m) == {o \in Messages \ {m} : KeyOf(o) = KeyOf(m)}
Overtakes(m) ==
    LET ahead == {o \in Others(m) : Blocks(o) /\ GoesBefore(o, m)} IN
    \/ \E o \in ahead : Waiting(o)
    \/ Cardinality(ahead) >= Room(m)

\* What a claim finds in the line. Messages that supersede each other do not check it.
Seen(o, m) == IF Mutant = "rank ignored" THEN InLine(m) => o < m ELSE GoesBefore(o, m)
Behind(m) ==
    LET ahead == {o \in Others(m) : Blocks(o) /\ (Keeps(o) => Mutant # "kept ignored") /\ Seen(o, m)} IN
    /\ Mutant # "line ignored" /\ Newest = "no"
    /\ \/ \E o \in ahead : Waiting(o)
       \/ Cardinality(ahead) >= Room(m)

\* A newer message has begun, or waits. The mark of the key names the newest one that has begun. No
\* body of these messages fails, so that is the newest one that is PROCESSING or DONE.
HasBegun(o) == Is(o, "PROCESSING") \/ Is(o, "DONE")
Outdated(m) ==
    /\ Newest # "no"
    /\ \E o \in Others(m) : o > m /\ (StandsInLine(o) \/ (HasBegun(o) /\ Mutant # "mark ignored"))

\* The other messages, after message m has begun or was parked.
Superseded(m) == IF Newest = "no" THEN {} ELSE {o \in Others(m) : StandsInLine(o)}
AfterSuperseding(o, m) ==
    CASE o \in Superseded(m) /\ Mutant = "superseded untold" -> [Unknown EXCEPT !.state = "FAILED"]
      [] o \in Superseded(m) -> After(o, "supersede", "superseded", "FAILED")
      [] OTHER -> row[o]
\* The superseded message that is sent to notify its caller. At most one waits. If a message was
\* promoted, it is on its way.
ToTell(m) ==
    LET waiting == {o \in Superseded(m) : Waiting(o)} IN
    IF waiting = {} \/ Mutant = "superseded untold" THEN 0 ELSE CHOOSE o \in waiting : TRUE

Promoted(k) == {m \in Messages : KeyOf(m) = k /\ Expected(m)}
First(k) ==
    LET waiting == {m \in Messages : KeyOf(m) = k /\ Waiting(m)}
        first(m) == \A o \in waiting \ {m} :
            IF Mutant = "rank ignored" THEN m < o ELSE Before(m, o)
    IN  IF waiting = {} THEN 0 ELSE CHOOSE m \in waiting : first(m)
\* Whether the first message that waits for a key may be promoted.
MayPromote(k) ==
    /\ First(k) # 0
    /\ time.shut[k] # "long"
    /\ Cardinality(Taken(k, held)) < Slots
    /\ \/ Mutant = "all promoted"
       \/ Cardinality(Promoted(k)) + Cardinality(Taken(k, held)) < Slots
    /\ ~\E o \in Others(First(k)) : Keeps(o) /\ Before(o, First(k))
Promote(m) ==
    /\ row' = [row EXCEPT ![m] = After(m, "promote", IF Strict THEN "kept" ELSE "promoted", "NEW")]
    /\ UNCHANGED held
    /\ Unflushed

(***************************************************************************)
(* The way of one delivery.                                                *)
(***************************************************************************)

Receive(w, m, kind) ==
    /\ worker[w].at = "idle"
    /\ copies[<<m, kind>>] > 0
    /\ copies' = [copies EXCEPT ![<<m, kind>>] = @ - 1]
    /\ worker' = [worker EXCEPT ![w] = [Idle EXCEPT
           !.at = IF m \in time.expired THEN "expired" ELSE "admit", !.m = m, !.kind = kind]]
    /\ Read /\ NoFault
    /\ UNCHANGED <<lock, hint, relay, history, time>>

\* A promoted message waits a moment for deliveries that only probe, or claim.
IsLooking(w) == worker[w].at \in {"claim", "warn", "hand over", "turn away", "unlock", "unlock done", "unprobe"}
Patient(w) ==
    /\ worker[w].kind = "promoted"
    /\ \A i \in 1..Slots :
        LET k == <<KeyOf(worker[w].m), i>> IN
        lock[k] \in Workers /\ K(lock[k]) = k /\ IsLooking(lock[k])

\* A delivery of an expired message ends its work, unless it is in progress, and promotes the next.
Expired(w) ==
    LET m == worker[w].m IN
    /\ worker[w].at = "expired"
    /\ IF Is(m, "PROCESSING") \/ Is(m, "DONE") \/ (row[m].line = "promoted" /\ Mutant = "expired and promoted")
       THEN Read
       ELSE row' = [row EXCEPT ![m] = After(m, "end", "-", "FAILED")] /\ UNCHANGED held /\ Flushed
    /\ Goto(w, CASE Mutant = "expired and gone" -> "ack"
                 [] ~Hints -> "look"
                 [] worker[w].kind = "promoted" /\ Mutant # "reserved for the expired" -> "free reserved"
                 [] OTHER -> "hint and look")
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

\* Release the key that is reserved for the expired message, as after a body. If another delivery
\* holds the key by now, the hint was left for it, and is left again.
FreeReserved(w) ==
    LET key == KeyOf(worker[w].m)
        slot == K(w)
        known == lock[slot] = Reserved
    IN
    /\ worker[w].at = "free reserved"
    /\ hint' = [hint EXCEPT ![key] = FALSE]
    /\ lock' = IF known THEN [lock EXCEPT ![slot] = IF hint[key] THEN Reserved ELSE Free] ELSE lock
    /\ worker' = [worker EXCEPT ![w].looks = IF known /\ hint[key] THEN Looks ELSE 0,
                                ![w].at = IF known THEN "look" ELSE "hint and look"]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, relay, history, time>>

Follows(w) == worker[w].m \in Chained

\* A delivery that is answered from the record. If the work was superseded, its caller is notified.
Answer(w) ==
    LET m == worker[w].m IN
    IF row[m].line = "superseded"
    THEN row' = [row EXCEPT ![m] = After(m, "notify", "-", "FAILED")] /\ UNCHANGED held /\ Flushed
    ELSE Read

MayTake(w, k) ==
    \/ lock[k] = Free
    \/ lock[k] = Reserved /\ worker[w].kind = "promoted" /\ Mutant # "reserved from all"

Admit(w) ==
    LET m == worker[w].m
        key == KeyOf(m)
        free == {i \in 1..Slots : MayTake(w, <<key, i>>)}
    IN
    /\ worker[w].at = "admit"
    /\ ~Patient(w)
    /\ IF free # {}
       THEN \E i \in free :
                /\ lock' = [lock EXCEPT ![<<key, i>>] = w]
                /\ worker' = [worker EXCEPT ![w].at = "claim", ![w].slot = i]
                /\ Read
       ELSE /\ UNCHANGED lock
            \* With slots the lock is not probed, because another slot may be free before.
            /\ worker' = [worker EXCEPT
                   ![w].then = Ended(m) /\ Follows(w) /\ Mutant # "answered and gone",
                   ![w].at = CASE Ended(m) -> "look"
                               [] Slots > 1 -> "park"
                               [] Newest = "supersede" -> "claim held"
                               [] OTHER -> "park held"]
            /\ IF Ended(m) THEN Answer(w) ELSE Read
    /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* Whether the ledger's holder keeps the key from this message.
IsBusy(w) ==
    /\ held[K(w)] # Free
    /\ Is(worker[w].m, "PROCESSING") \/ (Newest # "supersede" /\ ~Outdated(worker[w].m))

\* The claim is granted. Older work that is in progress ends, and older messages that wait, too.
Grant(w, at) ==
    LET m == worker[w].m
        k == K(w)
        charged == ~(Mutant = "retry not charged" /\ Is(m, "FAILED"))
        granted == After(m, "claim", IF Strict THEN "kept" ELSE "-", "PROCESSING")
        ends(o) == Newest # "no" /\ o # m /\ KeyOf(o) = k[1] /\ Is(o, "PROCESSING")
    IN
    /\ time' = IF Rated /\ charged THEN [time EXCEPT !.shut[k[1]] = "long"] ELSE time
    /\ held' = [held EXCEPT ![k] = w]
    /\ row' = [o \in Messages |-> CASE o = m -> granted
                                    [] ends(o) -> After(o, "supersede", "-", "FAILED")
                                    [] OTHER -> AfterSuperseding(o, m)]
    /\ Unflushed
    /\ worker' = [worker EXCEPT ![w].at = at, ![w].owner = IF at = "body" THEN Free ELSE held[k],
                                ![w].tell = ToTell(m),
                                ![w].known = IF Mutant = "waited ignored"
                                             THEN Is(m, "PROCESSING") ELSE row[m] # Unknown]
    /\ history' = [history EXCEPT
           !.early = @ \/ time.shut[k[1]] # "no",
           !.overtaken = @ \/ IF Newest = "no" THEN ~Is(m, "PROCESSING") /\ Overtakes(m)
                              ELSE \E o \in Others(m) : o > m /\ HasBegun(o)]

IsEarly(m, mutant) ==
    /\ time.shut[KeyOf(m)] # "no"
    /\ Mutant # mutant
    /\ ~(Mutant = "retry not charged" /\ Is(m, "FAILED"))

\* This message never runs: a newer one has begun, or waits.
EndOutdated(m) ==
    /\ row' = [row EXCEPT ![m] = After(m, "supersede", "-", "FAILED")]
    /\ UNCHANGED held
    /\ Flushed

\* The ledger's answer. A delivery that is refused releases the lock, or hands it over to its holder.
Claim(w) ==
    LET m == worker[w].m k == K(w) IN
    /\ worker[w].at = "claim"
    /\ CASE Ended(m) ->
              /\ worker' = [worker EXCEPT ![w].at = "unlock",
                                          ![w].then = Follows(w) /\ Mutant # "answered and gone"]
              /\ Answer(w)
              /\ UNCHANGED <<history, time>>
         [] IsBusy(w) ->
              /\ worker' = [worker EXCEPT ![w].at = IF Hints THEN "warn" ELSE "hand over",
                                          ![w].owner = held[k]]
              /\ Read
              /\ UNCHANGED <<history, time>>
         [] Outdated(m) ->
              /\ EndOutdated(m)
              /\ Goto(w, "unlock")
              /\ UNCHANGED <<history, time>>
         [] ~Is(m, "PROCESSING") /\ Behind(m) ->
              /\ Goto(w, "turn away")
              /\ Read
              /\ UNCHANGED <<history, time>>
         [] IsEarly(m, "none of these") ->
              /\ Goto(w, "turn away")
              /\ time' = IF Mutant = "too early charged" THEN [time EXCEPT !.shut[k[1]] = "long"] ELSE time
              /\ Read
              /\ UNCHANGED history
         [] OTHER -> Grant(w, "body")
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay>>

\* With "supersede" a message claims a key that is held at the lock server. The key is not taken from
\* a delivery that is about to claim, or to end.
ClaimHeld(w) ==
    LET m == worker[w].m k == K(w) IN
    /\ worker[w].at = "claim held"
    /\ CASE Ended(m) -> Goto(w, "look") /\ Answer(w) /\ UNCHANGED <<history, time>>
         [] held[k] = Free \/ IsBusy(w) -> Goto(w, "park held") /\ Read /\ UNCHANGED <<history, time>>
         [] Outdated(m) -> Goto(w, "look") /\ EndOutdated(m) /\ UNCHANGED <<history, time>>
         [] IsEarly(m, "taken too early") -> Goto(w, "park held") /\ Read /\ UNCHANGED <<history, time>>
         [] OTHER -> Grant(w, "take lock")
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay>>

\* At the lock server the key goes from the superseded holder to this one.
TakeLock(w) ==
    /\ worker[w].at = "take lock"
    /\ lock' = IF lock[K(w)] = worker[w].owner THEN [lock EXCEPT ![K(w)] = w] ELSE lock
    /\ worker' = [worker EXCEPT ![w].at = "body", ![w].owner = Free]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* Send the superseded message, so that its caller is notified. The broker may refuse it.
Tell(w) ==
    /\ \/ copies' = Added(worker[w].tell, "new") /\ NoFault
       \/ UNCHANGED copies /\ Fault("loss")
    /\ worker' = [worker EXCEPT ![w].tell = 0]
    /\ Read
    /\ UNCHANGED <<lock, hint, relay, history, time>>

\* The lock server has forgotten the key, and maybe a hint with it: leave one for the messages that wait.
Warn(w) ==
    /\ worker[w].at = "warn"
    /\ hint' = [hint EXCEPT ![KeyOf(worker[w].m)] = TRUE]
    /\ Goto(w, "hand over")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, lock, relay, history, time>>

\* Hand the lock over to the holder that the refusal named. It may have ended without knowing of this lock.
HandOver(w) ==
    LET owner == IF held[K(w)] = worker[w].owner THEN held[K(w)] ELSE Dead IN
    /\ worker[w].at = "hand over"
    /\ lock' = IF lock[K(w)] = w THEN [lock EXCEPT ![K(w)] = owner] ELSE lock
    /\ worker' = [worker EXCEPT
           ![w].at = IF owner = Dead /\ Mutant # "ended trusted" THEN "take back" ELSE "park",
           ![w].owner = Free]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* The ledger says that this holder has ended.
TakeBack(w) ==
    /\ worker[w].at = "take back"
    /\ lock' = IF lock[K(w)] = Dead THEN [lock EXCEPT ![K(w)] = Free] ELSE lock
    /\ Goto(w, "park")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* Release the lock, unless the lock server has forgotten it.
Release(w, place) ==
    /\ lock' = IF lock[K(w)] = w THEN [lock EXCEPT ![K(w)] = Free] ELSE lock
    /\ Goto(w, place)
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

TurnAway(w) == worker[w].at = "turn away" /\ Release(w, "park")

\* The work is DONE, and the ledger's lease ends.
Complete(w) ==
    /\ worker[w].at = "body"
    /\ held[K(w)] = w
    /\ held' = [held EXCEPT ![K(w)] = Free]
    /\ row' = [row EXCEPT ![worker[w].m] = After(worker[w].m, "end", "-", "DONE")]
    /\ Flushed
    /\ worker' = [worker EXCEPT ![w].at = IF Hints THEN "unlock hinted" ELSE "unlock done",
                                ![w].then = Follows(w)]
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

\* The body raises. The work is FAILED, and keeps its position until its queue has decided.
Fail(w) ==
    /\ Strict
    /\ worker[w].at = "body"
    /\ held[K(w)] = w
    /\ Fault("failure")
    /\ held' = [held EXCEPT ![K(w)] = Free]
    /\ row' = [row EXCEPT ![worker[w].m].state = "FAILED"]
    /\ Flushed
    /\ Goto(w, "unlock failed")
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

UnlockFailed(w) == worker[w].at = "unlock failed" /\ Release(w, "retry or not")

\* The queue sends a retry, or gives up. The record changes only if no other delivery has changed it.
RetryOrNot(w) ==
    LET m == worker[w].m
        changes(event, line) ==
            IF Is(m, "FAILED") /\ Keeps(m)
            THEN row' = [row EXCEPT ![m] = After(m, event, line, "FAILED")] /\ UNCHANGED held /\ Flushed
            ELSE Read
    IN
    /\ worker[w].at = "retry or not"
    /\ \/ /\ copies' = Added(m, Again)
          /\ changes("keep", "kept")
          /\ Goto(w, "look")
       \/ /\ changes("leave", "-")
          /\ Goto(w, IF Mutant = "gave up and gone" THEN "ack" ELSE "look")
          /\ UNCHANGED copies
    /\ NoFault
    /\ UNCHANGED <<lock, hint, relay, history, time>>

\* Release the key and take its hint, in one step. If there was one, the key is reserved.
TakeHint(w) ==
    LET key == KeyOf(worker[w].m)
        known == lock[K(w)] = w
        none == ~hint[key] /\ (known \/ Mutant = "forgotten trusted")
    IN
    /\ hint' = [hint EXCEPT ![key] = FALSE]
    /\ lock' = IF known THEN [lock EXCEPT ![K(w)] = IF hint[key] THEN Reserved ELSE Free] ELSE lock
    /\ worker' = [worker EXCEPT ![w].looks = IF hint[key] THEN Looks ELSE 0,
                                ![w].at = IF none /\ worker[w].kind = "new" /\ ~worker[w].known
                                          THEN "ack" ELSE "look"]

UnlockHinted(w) ==
    /\ worker[w].at = "unlock hinted"
    /\ TakeHint(w)
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, relay, history, time>>

\* The key is reserved, and no message was promoted. A message that was parked meanwhile relied on
\* the reservation. If the lock server has forgotten it, it may have forgotten a hint, too.
GiveBack(w) ==
    LET key == KeyOf(worker[w].m)
        slot == K(w)
        known == lock[slot] = Reserved
        none == ~hint[key] /\ (known \/ Mutant = "forgotten trusted")
    IN
    /\ worker[w].at = "give back"
    /\ hint' = [hint EXCEPT ![key] = FALSE]
    /\ lock' = IF known THEN [lock EXCEPT ![slot] = IF hint[key] THEN Reserved ELSE Free] ELSE lock
    /\ worker' = [worker EXCEPT ![w].looks = IF hint[key] THEN @ - 1 ELSE 0,
                                ![w].at = IF none THEN "ack" ELSE "look"]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, relay, history, time>>

\* A crash of the database has undone the claim: the delivery comes again. Or a newer message has
\* taken the key: the delivery is answered from the record.
Stale(w) ==
    /\ worker[w].at = "body"
    /\ held[K(w)] # w
    /\ IF Ended(worker[w].m)
       THEN Goto(w, "unlock") /\ UNCHANGED <<copies, lock, hint>>
       ELSE /\ copies' = Back(w)
            /\ IF Hints
               THEN TakeHint(w)
               ELSE /\ lock' = IF lock[K(w)] = w THEN [lock EXCEPT ![K(w)] = Free] ELSE lock
                    /\ Goto(w, "look")
                    /\ UNCHANGED hint
    /\ Read /\ NoFault
    /\ UNCHANGED <<relay, history, time>>

Unlock(w) ==
    /\ worker[w].at \in {"unlock", "unlock done"}
    /\ Release(w, IF \/ Mutant = "no look after release" /\ worker[w].at = "unlock done"
                     \/ Mutant = "no look after answer" /\ worker[w].at = "unlock"
                  THEN "ack" ELSE "look")

\* Work that is in progress or has ended is not parked: its copy goes back, and comes again.
Park(w) ==
    LET m == worker[w].m
        probes == worker[w].at = "park held"
        stays == Mutant = "stays promoted" /\ InLine(m)
        replaces == Mutant # "both wait"
    IN
    /\ worker[w].at \in {"park", "park held"}
    /\ CASE Is(m, "PROCESSING") \/ Ended(m) ->
              /\ Read
              /\ copies' = Added(m, Again)
              /\ Goto(w, "look")
         [] Outdated(m) ->
              /\ EndOutdated(m)
              /\ UNCHANGED copies
              /\ Goto(w, "look")
         [] OTHER ->
              /\ row' = [o \in Messages |->
                     CASE o = m -> IF stays THEN row[m] ELSE After(m, "park", "waiting", "NEW")
                       [] replaces -> AfterSuperseding(o, m)
                       [] OTHER -> row[o]]
              /\ UNCHANGED <<held, copies>>
              /\ IF Mutant = "unflushed park" THEN Unflushed ELSE Flushed
              /\ worker' = [worker EXCEPT
                     ![w].then = Follows(w) /\ Mutant = "parked answered",
                     ![w].tell = IF replaces THEN ToTell(m) ELSE 0,
                     ![w].at = CASE Mutant = "no look after parking" -> "ack"
                                 [] Hints -> IF probes THEN "hint" ELSE "hint and look"
                                 [] probes /\ Mutant = "no probe" -> "ack"
                                 [] probes -> "probe"
                                 [] OTHER -> "look"]
    /\ NoFault
    /\ UNCHANGED <<lock, hint, relay, history, time>>

\* Leave a hint and learn whether the key is free, in one step. If the ledger refused the claim, the
\* line is checked in any case.
LeaveHint(w) ==
    /\ worker[w].at \in {"hint", "hint and look"}
    /\ IF Mutant = "hint late"
       THEN /\ Goto(w, IF lock[K(w)] = Free \/ worker[w].at = "hint and look" THEN "look" ELSE "late hint")
            /\ UNCHANGED hint
       ELSE /\ Goto(w, IF lock[K(w)] = Free \/ worker[w].at = "hint and look" THEN "look" ELSE "ack")
            /\ hint' = [hint EXCEPT ![KeyOf(worker[w].m)] = TRUE]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, lock, relay, history, time>>

LateHint(w) ==
    /\ worker[w].at = "late hint"
    /\ hint' = [hint EXCEPT ![KeyOf(worker[w].m)] = TRUE]
    /\ Goto(w, "ack")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, lock, relay, history, time>>

Probe(w) ==
    /\ worker[w].at = "probe"
    /\ IF lock[K(w)] = Free
       THEN lock' = [lock EXCEPT ![K(w)] = IF Mutant = "probe kept" THEN Dead ELSE w]
            /\ Goto(w, IF Mutant = "probe kept" THEN "look" ELSE "unprobe")
       ELSE UNCHANGED lock /\ Goto(w, "ack")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

Unprobe(w) == worker[w].at = "unprobe" /\ Release(w, "look")

\* Promote the first message if its key is free. With slots, promote as many as there is room for.
AfterSending(w) == Goto(w, IF Slots > 1 THEN "look" ELSE "ack")
Look(w) ==
    LET key == KeyOf(worker[w].m) IN
    /\ worker[w].at = "look"
    /\ IF MayPromote(key)
       THEN /\ Promote(First(key))
            /\ worker' = [worker EXCEPT ![w].at = "send", ![w].send = First(key)]
       ELSE /\ Read
            /\ Goto(w, IF worker[w].looks > 0 /\ Mutant # "reserved for none" THEN "give back" ELSE "ack")
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

Send(w) ==
    /\ worker[w].at = "send"
    /\ copies' = Added(worker[w].send, "promoted")
    /\ AfterSending(w)
    /\ Read /\ NoFault
    /\ UNCHANGED <<lock, hint, relay, history, time>>

SendLost(w) ==
    /\ worker[w].at = "send"
    /\ AfterSending(w)
    /\ Fault("loss")
    /\ Read
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

\* The queue sends the message that follows an answered one, before it acknowledges the answered one.
Then(w) ==
    /\ worker[w].at = "ack" /\ worker[w].then
    /\ copies' = Added(worker[w].m + 1, "new")
    /\ worker' = [worker EXCEPT ![w].then = FALSE]
    /\ Read /\ NoFault
    /\ UNCHANGED <<lock, hint, relay, history, time>>

Acknowledge(w) ==
    LET m == worker[w].m IN
    /\ worker[w].at = "ack" /\ ~worker[w].then
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ history' = IF Newest # "no" /\ Ended(m) THEN [history EXCEPT !.told = @ \cup {m}] ELSE history
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay, time>>

Step(w) ==
    IF worker[w].tell # 0
    THEN Tell(w)
    ELSE \/ Expired(w) \/ FreeReserved(w) \/ Admit(w) \/ Claim(w) \/ ClaimHeld(w) \/ TakeLock(w)
         \/ HandOver(w) \/ TurnAway(w) \/ Complete(w) \/ UnlockFailed(w) \/ RetryOrNot(w) \/ Stale(w)
         \/ Warn(w) \/ UnlockHinted(w) \/ GiveBack(w) \/ TakeBack(w) \/ LeaveHint(w) \/ LateHint(w)
         \/ Unlock(w) \/ Park(w) \/ Probe(w) \/ Unprobe(w) \/ Look(w) \/ Send(w)
         \/ Then(w) \/ Acknowledge(w)

(***************************************************************************)
(* Callers, faults, time and the relay.                                    *)
(***************************************************************************)

\* A caller commits the message with its position, and sends it.
Enqueue(m) ==
    /\ m \in Enqueued /\ row[m] = Unknown
    /\ row' = [row EXCEPT ![m] = After(m, "enqueue", "kept", "NEW")]
    /\ copies' = Added(m, "new")
    /\ UNCHANGED held
    /\ Flushed
    /\ NoFault
    /\ UNCHANGED <<lock, hint, worker, relay, history, time>>

Buried(w, owners) == [k \in AllSlots |-> IF owners[k] = w THEN Dead ELSE owners[k]]

\* The worker dies, and the broker keeps the message that it had in hand.
Crash(w) ==
    /\ worker[w].at # "idle"
    /\ Fault("crash")
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ copies' = IF Mutant = "early ack" /\ worker[w].at # "admit" THEN copies
                 ELSE Back(w)
    /\ lock' = Buried(w, lock)
    /\ held' = Buried(w, held)
    /\ disk' = [disk EXCEPT !.held = Buried(w, @)]
    /\ UNCHANGED <<hint, row, relay, history, time>>

\* The lease of a dead holder ends in the ledger.
Expire ==
    /\ \E k \in AllSlots : held[k] = Dead
    /\ held' = [k \in AllSlots |-> IF held[k] = Dead THEN Free ELSE held[k]]
    /\ disk' = [disk EXCEPT !.held = [k \in AllSlots |-> IF @[k] = Dead THEN Free ELSE @[k]]]
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, row, worker, relay, history, time>>

\* The lease of a dead holder ends at the lock server.
Forget ==
    /\ \E k \in AllSlots : lock[k] = Dead
    /\ lock' = [k \in AllSlots |-> IF lock[k] = Dead THEN Free ELSE lock[k]]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, worker, relay, history, time>>

\* The promoted message did not arrive while the key was reserved for it.
ReservationEnds(k) ==
    /\ lock[k] = Reserved
    /\ lock' = [lock EXCEPT ![k] = Free]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, worker, relay, history, time>>

Flush ==
    /\ Fault("flush")
    /\ lock' = [k \in AllSlots |-> Free]
    /\ hint' = [k \in AllKeys |-> FALSE]
    /\ Read
    /\ UNCHANGED <<copies, worker, relay, history, time>>

\* The broker loses a copy of a message that the ledger has.
Lose(m) ==
    /\ row[m].line # "-"
    /\ Fault("loss")
    /\ \E kind \in Kinds :
        /\ copies[<<m, kind>>] > 0
        /\ copies' = [copies EXCEPT ![<<m, kind>>] = @ - 1]
    /\ Read
    /\ UNCHANGED <<lock, hint, worker, relay, history, time>>

Duplicate(m) ==
    /\ \E w \in Workers : worker[w].m = m
    /\ Fault("twice")
    /\ copies' = Added(m, "new")
    /\ Read
    /\ UNCHANGED <<lock, hint, worker, relay, history, time>>

DatabaseCrash ==
    /\ disk # [held |-> held, row |-> row]
    /\ Fault("database")
    /\ held' = disk.held /\ row' = disk.row
    /\ UNCHANGED <<copies, lock, hint, disk, worker, relay, history, time>>

\* A message expires.
Ends(m) ==
    /\ m \in Mortal \ time.expired
    /\ time' = [time EXCEPT !.expired = @ \cup {m}]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, relay, history>>

\* The next start of a key comes nearer.
Opens(k) ==
    /\ time.shut[k] # "no"
    /\ time' = [time EXCEPT !.shut[k] = IF @ = "long" THEN "soon" ELSE "no"]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, relay, history>>

\* No copy of the message is on its way.
IsLost(m) ==
    /\ ~InBroker(m) /\ relay # m
    /\ ~\E w \in Workers : m \in {worker[w].m, worker[w].send, worker[w].tell}

\* A promoted message that is lost does not arrive before `due`.
Due(m) ==
    /\ Expected(m) /\ IsLost(m)
    /\ row' = [row EXCEPT ![m].late = TRUE]
    /\ UNCHANGED held
    /\ Flushed
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, relay, history, time>>

RelayPromotes(k) ==
    /\ Relay /\ relay = 0
    /\ MayPromote(k)
    /\ Promote(First(k))
    /\ relay' = First(k)
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, history, time>>

\* The relay notes that it has sent a message only after that.
RelaySendsAgain(m) ==
    /\ Relay /\ relay = 0
    /\ CASE row[m].line = "promoted" -> row[m].late
         [] row[m].line = "expired" -> TRUE
         [] row[m].line = "resent" -> ~InBroker(m) /\ ~\E w \in Workers : worker[w].m = m
         [] row[m].line = "superseded" -> IsLost(m)
         [] Keeps(m) -> IsLost(m) /\ (Is(m, "PROCESSING") => held[<<KeyOf(m), 1>>] = Free)
         [] OTHER -> FALSE
    /\ row' = [row EXCEPT ![m] =
           After(m, "send again", IF row[m].line \in {"kept", "superseded"} THEN row[m].line ELSE "resent", @.state)]
    /\ copies' = Added(m, "new")
    /\ UNCHANGED held
    /\ Flushed
    /\ NoFault
    /\ UNCHANGED <<lock, hint, worker, relay, history, time>>

\* A message that has a position and did not arrive is promoted in its turn.
RelayUnsends(m) ==
    /\ Relay /\ relay = 0
    /\ Keeps(m) /\ Is(m, "NEW") /\ IsLost(m)
    /\ row' = [row EXCEPT ![m] = After(m, "unsend", "waiting", "NEW")]
    /\ UNCHANGED held
    /\ Flushed
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, relay, history, time>>

\* A message that expired while it waited is sent again.
RelayFindsExpired(m) ==
    /\ Relay /\ relay = 0
    /\ Waiting(m) /\ m \in time.expired
    /\ row' = [row EXCEPT ![m] = After(m, "expire", "expired", "NEW")]
    /\ UNCHANGED held
    /\ Flushed
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, relay, history, time>>

RelaySends ==
    /\ relay # 0
    /\ copies' = Added(relay, "promoted")
    /\ relay' = 0
    /\ Read /\ NoFault
    /\ UNCHANGED <<lock, hint, worker, history, time>>

RelayDies ==
    /\ relay # 0
    /\ Fault("crash")
    /\ relay' = 0
    /\ Read
    /\ UNCHANGED <<copies, lock, hint, worker, history, time>>

Next ==
    \/ \E w \in Workers :
        \/ Step(w) \/ SendLost(w) \/ Fail(w) \/ Crash(w)
        \/ \E m \in Messages, kind \in Kinds : Receive(w, m, kind)
    \/ \E m \in Messages : Enqueue(m) \/ Lose(m) \/ Duplicate(m) \/ Due(m) \/ Ends(m)
    \/ \E m \in Messages : RelaySendsAgain(m) \/ RelayUnsends(m) \/ RelayFindsExpired(m)
    \/ \E k \in AllKeys : RelayPromotes(k) \/ Opens(k)
    \/ RelaySends \/ RelayDies \/ (\E k \in AllSlots : ReservationEnds(k))
    \/ Expire \/ Forget \/ Flush \/ DatabaseCrash

Spec == Init /\ [][Next]_vars

Fairness ==
    /\ \A w \in Workers : WF_vars(Step(w)) /\ SF_vars(Admit(w))
    /\ \A m \in Messages, kind \in Kinds : SF_vars(\E w \in Workers : Receive(w, m, kind))
    /\ \A k \in AllSlots : WF_vars(ReservationEnds(k))
    /\ \A m \in Messages : WF_vars(Due(m)) /\ WF_vars(Enqueue(m)) /\ SF_vars(RelaySendsAgain(m))
    /\ \A m \in Messages : SF_vars(RelayFindsExpired(m))
    /\ \A k \in AllKeys : SF_vars(RelayPromotes(k)) /\ WF_vars(Opens(k))
    /\ WF_vars(RelaySends) /\ WF_vars(Expire) /\ WF_vars(Forget)

FairSpec == Spec /\ Fairness

(***************************************************************************)
(* Invariants and liveness.                                                *)
(***************************************************************************)

InHand(m) == \E w \in Workers : worker[w].m = m

\* A message is in the broker, in the hands of a worker, or in the ledger, or its work has ended. Or a
\* caller, or the delivery of the message before it in a chain, is still to send it.
OnRecord(m) == InBroker(m) \/ InHand(m) \/ row[m].line # "-" \/ Ended(m)
IsToCome(m) ==
    \/ m \in Enqueued
    \/ /\ m - 1 \in Chained
       /\ ~Ended(m - 1) \/ InBroker(m - 1) \/ InHand(m - 1) \/ m - 1 \in time.expired
\* The caller of a superseded message learns of it.
IsTold(m) == Is(m, "FAILED") /\ row[m].line = "-" => InBroker(m) \/ InHand(m) \/ m \in history.told
S7 == \A m \in Messages : (OnRecord(m) \/ IsToCome(m)) /\ (Newest # "no" => IsTold(m))

\* Each report to a queue is true: the next message of a chain is sent only after the one before it has ended.
S8 == \A m \in Chained : Ended(m) \/ ~OnRecord(m + 1)

\* No message begins while an earlier one waits or is expected, or has begun and not ended with Strict.
S9 == Newest = "no" => ~history.overtaken
\* In each line at most as many messages are expected at a time as may hold its key.
S9One == \A k \in AllKeys : Cardinality(Promoted(k)) <= Slots

\* No message begins after a newer one has begun. At most one waits.
S11 == Newest # "no" => ~history.overtaken
S11One == Newest # "no" => \A k \in AllKeys : Cardinality({m \in Messages : KeyOf(m) = k /\ Waiting(m)}) <= 1

\* No message begins while its key is shut.
S12 == ~history.early

\* No message waits for a free key while no delivery of that key is in progress. With slots, bodies do
\* not count as deliveries in progress.
L6 == \A k \in AllKeys :
    \/ ~\E m \in Messages : KeyOf(m) = k /\ StandsInLine(m)
    \/ Cardinality(Taken(k, held)) = Slots
    \/ \E m \in Messages : KeyOf(m) = k /\ InBroker(m)
    \/ \E w \in Workers : worker[w].at \notin {"idle", "body"} /\ KeyOf(worker[w].m) = k

\* All work ends, and no caller is still to be notified.
L1 == <>(\A m \in Messages : Ended(m) /\ row[m].line = "-")

Symmetry == Permutations(Workers)

\* Messages arrive first in the order in which they were sent. Mutants are found sooner with it.
InOrder == \A m \in Messages \ {1} : InHand(m) \/ row[m] # Unknown => InHand(m - 1) \/ row[m - 1] # Unknown
=============================================================================
