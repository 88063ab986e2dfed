-------------------------------- MODULE Line --------------------------------
(***************************************************************************)
(* Messages that wait for their key in the ledger (busy="park"): parking,  *)
(* calling, the claim that looks at the line, and what may befall between. *)
(* Leases, fences and effects are Taskguard.tla's; here a claim that is    *)
(* granted is the only holder.  Invariants have the project's names.       *)
(*                                                                         *)
(* What is modelled                                                        *)
(*                                                                         *)
(*   Several keys, one lock server, one ledger.  Each message is work of   *)
(*     its own, of one key; they were sent in the order of their numbers.  *)
(*     That is their place in the line; with ranks the even ones go first. *)
(*   Each key has Slots: whoever holds it holds one of them, in the ledger *)
(*     and at the lock server.  With one it is the key itself.             *)
(*   The ledger: who holds each key, and of each message its record:       *)
(*     "none", "waits", "called" (its message was sent and is expected),   *)
(*     "late" (it did not come in time), "again" (a relay sent it once     *)
(*     more), "begun", "done".  Every step on it is one transaction.  A    *)
(*     call is not flushed: a crash of the database may take it back.      *)
(*   A delivery: ask the lock server; claim, unless somebody who came      *)
(*     before waits or is expected; run, complete, release, call the next, *)
(*     send, acknowledge.  Or: park, take the lock to see whether it is    *)
(*     free, release it, call the next if it was.                          *)
(*   Where the lock server keeps hints, who has parked leaves one, and is  *)
(*     told whether the key is free.  Who releases after a body takes it:  *)
(*     without one a first delivery calls nobody, and with one the key is  *)
(*     kept for who is called, or given back if nobody is.  Kept it is for *)
(*     a moment.  Beside such a server there are no slots.                 *)
(*   The broker: copies of each message that nobody has in hand; what a    *)
(*     dead worker had in hand is delivered again.                         *)
(*   Of a key with a rate each start shuts it for a while.  In a while it  *)
(*     opens soon: from then on somebody is called, to come then, who may  *)
(*     come too early.                                                     *)
(*   Messages that expire, at any moment: a worker that gets one says so,  *)
(*     and runs it not; its work is done in vain, and the next is called.  *)
(*   Chains: the message after one of Chained is sent by whoever answers   *)
(*     that one, before he acknowledges it; each time that it is answered. *)
(*   The relay, where there is one: it calls for a key that is free, and   *)
(*     sends again what was called and did not come, and what has expired  *)
(*     while it waited.                                                    *)
(*   Faults, MaxFaults of them: a worker or a relay dies; the lock server  *)
(*     forgets everything; a message that was sent is lost, in the broker  *)
(*     or before it; a message is delivered twice; the database crashes.   *)
(*                                                                         *)
(* What is left out                                                        *)
(*                                                                         *)
(*   Bodies that fail, retries, messages that are put off; several         *)
(*   messages of one work (Enqueue.tla); who was called waits no second    *)
(*   for the lock server, but is parked at once; no answer of the lock     *)
(*   server.                                                               *)
(*   A lease ends when its holder is dead, never before.                   *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Workers,
    Last,       \* the number of the last message
    Keys,       \* of how many keys they are, in turn
    Slots,      \* how many may hold a key at once
    Ranked,     \* whether the even messages go first
    Hints,      \* whether the lock server keeps them
    Rated,      \* whether a start shuts its key for a while
    Mortal,     \* the messages that may expire
    Chained,    \* the messages whose next one follows them
    Relay,      \* whether there is one
    Fates,      \* which faults there are
    MaxFaults,
    Mutant,     \* what is wrong with the design; "none" is the design
    Nobody,
    Gone,       \* whoever has died
    Kept        \* whoever is called

ASSUME Fates \subseteq {"crash", "flush", "loss", "twice", "database"}
ASSUME Hints => Slots = 1 /\ ~Rated

ASSUME Mutant \in {
    "none",
    "no look after parking",  \* who is parked leaves it to the holder to call him
    "no look after release",  \* who has released the key goes home
    "no look after answer",   \* so does who had it, and finds his work done
    "no probe",               \* who was told that it is taken believes that after he was parked
    "probe kept",             \* he takes the lock to see, and leaves it there
    "stays called",           \* who was called and is parked again counts as called
    "line ignored",           \* a claim does not look at the line
    "rank ignored",           \* who was sent first is called, and claims, first
    "all called",             \* the next is called while another one is expected
    "hint late",              \* who was parked sees that the key is taken, then leaves his hint
    "forgotten trusted",      \* who finds his lock forgotten believes that there was no hint
    "waited ignored",         \* so does who waited, and comes before he was called
    "ended trusted",          \* a lock that is handed to who has ended is left to its lease's end
    "kept for nobody",        \* a key that is kept is not given back if nobody was called
    "kept from all",          \* nor taken by who was called
    "too early charged",      \* who comes before the key has opened shuts it again
    "expired and gone",       \* who says that his message has expired looks for nobody
    "kept for the expired",   \* or for the key that was kept for him
    "expired and called",     \* and leaves it to others to note it
    "parked answered",        \* who is parked sends what follows him
    "answered and gone",      \* who finds his work done does not
    "early ack",              \* acknowledged before the record is committed
    "unflushed park"}         \* and before it is flushed

VARIABLES
    copies,  \* how many of each message are in the broker, of each kind
    lock,    \* who holds each key at the lock server
    hint,    \* whether somebody waits for it, as the lock server knows
    held,    \* who holds each key in the ledger
    row,     \* the record of each message
    disk,    \* held and row as they are after a crash of the database
    worker,  \* what each is at: a step, a message, whom it is to send
    relay,   \* whom the relay is to send, or 0
    faults,
    history,
    time     \* whose message has expired, and which key is shut: "no", "soon" to open, or "long"

vars == <<copies, lock, hint, held, row, disk, worker, relay, faults, history, time>>

Messages == 1..Last
KeyOf(m) == m % Keys
AllKeys == {KeyOf(m) : m \in Messages}
AllSlots == AllKeys \X (1..Slots)
RankOf(m) == IF Ranked THEN m % 2 ELSE 0
Before(o, m) == RankOf(o) < RankOf(m) \/ (RankOf(o) = RankOf(m) /\ o < m)

\* What a delivery knows of its message: it was called, or delivered before; or is new, also where
\* it is one of two.
Kinds == {"new", "called", "again"}

Idle == [at |-> "idle", m |-> 0, kind |-> "new", known |-> FALSE, looks |-> 0,
         send |-> 0, owner |-> Nobody, slot |-> 1, then |-> FALSE]

Looks == 2 \* so often a key is given back: others may leave hints again and again

Added(m, kind) == [copies EXCEPT ![<<m, kind>>] = @ + 1]
InBroker(m) == \E kind \in Kinds : copies[<<m, kind>>] > 0
\* Without hints a second delivery does nothing else than a first one.
Again == IF Hints THEN "again" ELSE "new"
Back(w) == Added(worker[w].m, IF worker[w].kind = "called" THEN "called" ELSE Again)

Init ==
    /\ copies = [c \in Messages \X Kinds |-> IF c[2] = "new" /\ c[1] - 1 \notin Chained THEN 1 ELSE 0]
    /\ lock = [k \in AllSlots |-> Nobody]
    /\ hint = [k \in AllKeys |-> FALSE]
    /\ held = [k \in AllSlots |-> Nobody]
    /\ row = [m \in Messages |-> "none"]
    /\ disk = [held |-> held, row |-> row]
    /\ worker = [w \in Workers |-> Idle]
    /\ relay = 0
    /\ faults = 0
    /\ history = [overtaken |-> FALSE]
    /\ time = [expired |-> {}, shut |-> [k \in AllKeys |-> "no"]]

(***************************************************************************)
(* Small parts.                                                            *)
(***************************************************************************)

Fault(kind) == kind \in Fates /\ faults < MaxFaults /\ faults' = faults + 1
NoFault == UNCHANGED faults

K(w) == <<KeyOf(worker[w].m), worker[w].slot>> \* of who is at something
Taken(k, slots) == {i \in 1..Slots : slots[<<k, i>>] # Nobody}
Goto(w, place) == worker' = [worker EXCEPT ![w].at = place]

Flushed == disk' = [held |-> held', row |-> row']
Unflushed == disk' \in {disk, [held |-> held', row |-> row']}
Read == UNCHANGED <<held, row, disk>>

InLine(m) == row[m] \in {"waits", "called", "late", "again"}
Expected(m) == row[m] = "called"
Waits(m) == row[m] = "waits" \/ Expected(m)

\* Who has no place in the line stands behind all of his rank.
GoesBefore(o, m) ==
    IF InLine(m) THEN Before(o, m) ELSE RankOf(o) <= RankOf(m)
\* Of those the ones who wait, and who were called.
Ahead(m) == {o \in Messages \ {m} : KeyOf(o) = KeyOf(m) /\ Waits(o) /\ GoesBefore(o, m)}
Overtakes(m) ==
    \/ \E o \in Ahead(m) : row[o] = "waits"
    \/ Cardinality(Ahead(m)) >= Slots - Cardinality(Taken(KeyOf(m), held))

Seen(o, m) == IF Mutant = "rank ignored" THEN InLine(m) => o < m ELSE GoesBefore(o, m)
Behind(m) ==
    LET ahead == {o \in Messages \ {m} : KeyOf(o) = KeyOf(m) /\ Waits(o) /\ Seen(o, m)} IN
    /\ Mutant # "line ignored"
    /\ \/ \E o \in ahead : row[o] = "waits"
       \/ Cardinality(ahead) >= Slots - Cardinality(Taken(KeyOf(m), held))

Called(k) == {m \in Messages : KeyOf(m) = k /\ Expected(m)}
Callable(k) ==
    /\ time.shut[k] # "long"
    /\ Cardinality(Taken(k, held)) < Slots
    /\ \/ Mutant = "all called"
       \/ Cardinality(Called(k)) + Cardinality(Taken(k, held)) < Slots
First(k) ==
    LET waiting == {m \in Messages : KeyOf(m) = k /\ row[m] = "waits"}
        first(m) == \A o \in waiting \ {m} :
            IF Mutant = "rank ignored" THEN m < o ELSE Before(m, o)
    IN  IF waiting = {} THEN 0 ELSE CHOOSE m \in waiting : first(m)

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

\* Who was called waits a moment for those who only look, or claim.
IsLooking(w) == worker[w].at \in {"claim", "warn", "hand over", "turn away", "unlock", "unlock done", "unprobe"}
Patient(w) ==
    /\ worker[w].kind = "called"
    /\ \A i \in 1..Slots :
        LET k == <<KeyOf(worker[w].m), i>> IN
        lock[k] \in Workers /\ K(lock[k]) = k /\ IsLooking(lock[k])

\* Its work, unless somebody is at it, is done in vain, and out of the line; the next is called.
Expired(w) ==
    LET m == worker[w].m IN
    /\ worker[w].at = "expired"
    /\ IF row[m] = "begun" \/ (row[m] = "called" /\ Mutant = "expired and called")
       THEN Read
       ELSE row' = [row EXCEPT ![m] = "done"] /\ UNCHANGED held /\ Flushed
    /\ Goto(w, CASE Mutant = "expired and gone" -> "ack"
                 [] ~Hints -> "look"
                 [] worker[w].kind = "called" /\ Mutant # "kept for the expired" -> "free kept"
                 [] OTHER -> "hint and look")
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

\* The key that is kept for who was called, as after a body; if somebody has it by now the hint that
\* was taken is that one's, and left again.
FreeKept(w) ==
    LET key == KeyOf(worker[w].m)
        slot == K(w)
        known == lock[slot] = Kept
    IN
    /\ worker[w].at = "free kept"
    /\ hint' = [hint EXCEPT ![key] = FALSE]
    /\ lock' = IF known THEN [lock EXCEPT ![slot] = IF hint[key] THEN Kept ELSE Nobody] ELSE lock
    /\ worker' = [worker EXCEPT ![w].looks = IF known /\ hint[key] THEN Looks ELSE 0,
                                ![w].at = IF known THEN "look" ELSE "hint and look"]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, relay, history, time>>

Follows(w) == worker[w].m \in Chained

MayTake(w, k) ==
    \/ lock[k] = Nobody
    \/ lock[k] = Kept /\ worker[w].kind = "called" /\ Mutant # "kept from all"

Admit(w) ==
    /\ worker[w].at = "admit"
    /\ ~Patient(w)
    /\ LET key == KeyOf(worker[w].m) free == {i \in 1..Slots : MayTake(w, <<key, i>>)} IN
       IF free # {}
       THEN \E i \in free :
                /\ lock' = [lock EXCEPT ![<<key, i>>] = w]
                /\ worker' = [worker EXCEPT ![w].at = "claim", ![w].slot = i]
       ELSE /\ UNCHANGED lock
            \* Of slots nobody asks the lock server again: others may be free before.
            /\ worker' = [worker EXCEPT
                   ![w].then = row[worker[w].m] = "done" /\ Follows(w) /\ Mutant # "answered and gone",
                   ![w].at = CASE row[worker[w].m] = "done" -> "look"
                               [] Slots > 1 -> "park"
                               [] OTHER -> "park held"]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* The ledger's answer; who gets nothing lets the lock go, or hands it over to its true owner.
Claim(w) ==
    LET m == worker[w].m k == K(w) IN
    /\ worker[w].at = "claim"
    /\ \/ /\ row[m] = "done"
          /\ worker' = [worker EXCEPT ![w].at = "unlock",
                                      ![w].then = Follows(w) /\ Mutant # "answered and gone"]
          /\ Read
          /\ UNCHANGED <<history, time>>
       \/ /\ row[m] # "done" /\ held[k] # Nobody
          /\ worker' = [worker EXCEPT ![w].at = IF Hints THEN "warn" ELSE "hand over",
                                      ![w].owner = held[k]]
          /\ Read
          /\ UNCHANGED <<history, time>>
       \/ /\ row[m] # "done" /\ held[k] = Nobody /\ row[m] # "begun" /\ Behind(m)
          /\ Goto(w, "turn away")
          /\ Read
          /\ UNCHANGED <<history, time>>
       \/ /\ row[m] # "done" /\ held[k] = Nobody /\ (row[m] = "begun" \/ ~Behind(m))
          /\ time.shut[k[1]] # "no"
          /\ Goto(w, "turn away")
          /\ time' = IF Mutant = "too early charged" THEN [time EXCEPT !.shut[k[1]] = "long"] ELSE time
          /\ Read
          /\ UNCHANGED history
       \/ /\ row[m] # "done" /\ held[k] = Nobody /\ (row[m] = "begun" \/ ~Behind(m))
          /\ time.shut[k[1]] = "no"
          /\ time' = IF Rated THEN [time EXCEPT !.shut[k[1]] = "long"] ELSE time
          /\ held' = [held EXCEPT ![k] = w]
          /\ row' = [row EXCEPT ![m] = "begun"]
          /\ Unflushed
          /\ worker' = [worker EXCEPT ![w].at = "body", ![w].known = IF Mutant = "waited ignored"
                                                    THEN row[m] = "begun" ELSE row[m] # "none"]
          /\ history' = [history EXCEPT !.overtaken = @ \/
                 (row[m] # "begun" /\ Overtakes(m))]
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay>>

\* Of who waits for the key that the lock server has forgotten; the hint may be gone with it.
Warn(w) ==
    /\ worker[w].at = "warn"
    /\ hint' = [hint EXCEPT ![KeyOf(worker[w].m)] = TRUE]
    /\ Goto(w, "hand over")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, lock, relay, history, time>>

\* The true owner, as the refusal named him. He may have ended since, and not have known of it.
HandOver(w) ==
    LET owner == IF held[K(w)] = worker[w].owner THEN held[K(w)] ELSE Gone IN
    /\ worker[w].at = "hand over"
    /\ lock' = IF lock[K(w)] = w THEN [lock EXCEPT ![K(w)] = owner] ELSE lock
    /\ worker' = [worker EXCEPT
           ![w].at = IF owner = Gone /\ Mutant # "ended trusted" THEN "take back" ELSE "park",
           ![w].owner = Nobody]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* The ledger says that he has ended.
TakeBack(w) ==
    /\ worker[w].at = "take back"
    /\ lock' = IF lock[K(w)] = Gone THEN [lock EXCEPT ![K(w)] = Nobody] ELSE lock
    /\ Goto(w, "park")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

TurnAway(w) ==
    /\ worker[w].at = "turn away"
    /\ lock' = IF lock[K(w)] = w THEN [lock EXCEPT ![K(w)] = Nobody] ELSE lock
    /\ Goto(w, "park")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* DONE, and the end of the ledger's lease.
Complete(w) ==
    /\ worker[w].at = "body"
    /\ held[K(w)] = w
    /\ held' = [held EXCEPT ![K(w)] = Nobody]
    /\ row' = [row EXCEPT ![worker[w].m] = "done"]
    /\ Flushed
    /\ worker' = [worker EXCEPT ![w].at = IF Hints THEN "unlock hinted" ELSE "unlock done",
                                ![w].then = Follows(w)]
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

\* Release the key and take its hint, at once. If there was one the key is kept for who is called.
TakeHint(w) ==
    LET key == KeyOf(worker[w].m)
        known == lock[K(w)] = w
        nobody == ~hint[key] /\ (known \/ Mutant = "forgotten trusted")
    IN
    /\ hint' = [hint EXCEPT ![key] = FALSE]
    /\ lock' = IF known THEN [lock EXCEPT ![K(w)] = IF hint[key] THEN Kept ELSE Nobody] ELSE lock
    /\ worker' = [worker EXCEPT ![w].looks = IF hint[key] THEN Looks ELSE 0,
                                ![w].at = IF nobody /\ worker[w].kind = "new" /\ ~worker[w].known
                                          THEN "ack" ELSE "look"]

UnlockHinted(w) ==
    /\ worker[w].at = "unlock hinted"
    /\ TakeHint(w)
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, relay, history, time>>

\* Nobody was called for whom the key is kept: who was parked meanwhile relied on that. Where it is
\* not known to be kept any more a hint may have been forgotten with it.
GiveBack(w) ==
    LET key == KeyOf(worker[w].m)
        slot == K(w)
        known == lock[slot] = Kept
        nobody == ~hint[key] /\ (known \/ Mutant = "forgotten trusted")
    IN
    /\ worker[w].at = "give back"
    /\ hint' = [hint EXCEPT ![key] = FALSE]
    /\ lock' = IF known THEN [lock EXCEPT ![slot] = IF hint[key] THEN Kept ELSE Nobody] ELSE lock
    /\ worker' = [worker EXCEPT ![w].looks = IF hint[key] THEN @ - 1 ELSE 0,
                                ![w].at = IF nobody THEN "ack" ELSE "look"]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, relay, history, time>>

\* The claim was lost in a crash of the database: the delivery comes again.
Stale(w) ==
    /\ worker[w].at = "body"
    /\ held[K(w)] # w
    /\ copies' = Back(w)
    /\ IF Hints
       THEN TakeHint(w)
       ELSE /\ lock' = IF lock[K(w)] = w THEN [lock EXCEPT ![K(w)] = Nobody] ELSE lock
            /\ Goto(w, "look")
            /\ UNCHANGED hint
    /\ Read /\ NoFault
    /\ UNCHANGED <<relay, history, time>>

Unlock(w) ==
    /\ worker[w].at \in {"unlock", "unlock done"}
    /\ lock' = IF lock[K(w)] = w THEN [lock EXCEPT ![K(w)] = Nobody] ELSE lock
    /\ Goto(w, IF \/ Mutant = "no look after release" /\ worker[w].at = "unlock done"
                  \/ Mutant = "no look after answer" /\ worker[w].at = "unlock"
               THEN "ack" ELSE "look")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* What runs or is done is not parked; its copy goes back, and comes again.
Park(w) ==
    LET m == worker[w].m
        probes == worker[w].at = "park held"
    IN
    /\ worker[w].at \in {"park", "park held"}
    /\ IF row[m] \in {"begun", "done"}
       THEN /\ Read
            /\ copies' = Added(m, Again)
            /\ Goto(w, "look")
       ELSE /\ row' = [row EXCEPT ![m] =
                  IF Mutant = "stays called" /\ InLine(m) THEN @ ELSE "waits"]
            /\ UNCHANGED <<held, copies>>
            /\ IF Mutant = "unflushed park" THEN Unflushed ELSE Flushed
            /\ worker' = [worker EXCEPT
                   ![w].then = Follows(w) /\ Mutant = "parked answered",
                   ![w].at = CASE Mutant = "no look after parking" -> "ack"
                               [] Hints -> IF probes THEN "hint" ELSE "hint and look"
                               [] probes /\ Mutant = "no probe" -> "ack"
                               [] probes -> "probe"
                               [] OTHER -> "look"]
    /\ NoFault
    /\ UNCHANGED <<lock, hint, relay, history, time>>

\* At once: whether it is free. Whom the ledger refused looks in any case.
LeaveHint(w) ==
    /\ worker[w].at \in {"hint", "hint and look"}
    /\ IF Mutant = "hint late"
       THEN /\ Goto(w, IF lock[K(w)] = Nobody \/ worker[w].at = "hint and look" THEN "look" ELSE "late hint")
            /\ UNCHANGED hint
       ELSE /\ Goto(w, IF lock[K(w)] = Nobody \/ worker[w].at = "hint and look" THEN "look" ELSE "ack")
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
    /\ IF lock[K(w)] = Nobody
       THEN lock' = [lock EXCEPT ![K(w)] = IF Mutant = "probe kept" THEN Gone ELSE w]
            /\ Goto(w, IF Mutant = "probe kept" THEN "look" ELSE "unprobe")
       ELSE UNCHANGED lock /\ Goto(w, "ack")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

Unprobe(w) ==
    /\ worker[w].at = "unprobe"
    /\ lock' = IF lock[K(w)] = w THEN [lock EXCEPT ![K(w)] = Nobody] ELSE lock
    /\ Goto(w, "look")
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, relay, history, time>>

\* Whether somebody waits for the key that is free now; of several slots as many as there is room.
AfterSending(w) == Goto(w, IF Slots > 1 THEN "look" ELSE "ack")
Look(w) ==
    LET key == KeyOf(worker[w].m) first == First(key) IN
    /\ worker[w].at = "look"
    /\ IF first # 0 /\ Callable(key)
       THEN /\ row' = [row EXCEPT ![first] = "called"]
            /\ UNCHANGED held
            /\ Unflushed
            /\ worker' = [worker EXCEPT ![w].at = "send", ![w].send = first]
       ELSE /\ Read
            /\ Goto(w, IF worker[w].looks > 0 /\ Mutant # "kept for nobody" THEN "give back" ELSE "ack")
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

Send(w) ==
    /\ worker[w].at = "send"
    /\ copies' = Added(worker[w].send, "called")
    /\ AfterSending(w)
    /\ Read /\ NoFault
    /\ UNCHANGED <<lock, hint, relay, history, time>>

SendLost(w) ==
    /\ worker[w].at = "send"
    /\ AfterSending(w)
    /\ Fault("loss")
    /\ Read
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

\* What follows a message that was answered is sent, by its queue, before it is acknowledged.
Then(w) ==
    /\ worker[w].at = "ack" /\ worker[w].then
    /\ copies' = Added(worker[w].m + 1, "new")
    /\ worker' = [worker EXCEPT ![w].then = FALSE]
    /\ Read /\ NoFault
    /\ UNCHANGED <<lock, hint, relay, history, time>>

Acknowledge(w) ==
    /\ worker[w].at = "ack" /\ ~worker[w].then
    /\ worker' = [worker EXCEPT ![w] = Idle]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, relay, history, time>>

Step(w) ==
    \/ Expired(w) \/ FreeKept(w) \/ Admit(w) \/ Claim(w) \/ HandOver(w) \/ TurnAway(w) \/ Complete(w) \/ Stale(w)
    \/ Warn(w) \/ UnlockHinted(w) \/ GiveBack(w) \/ TakeBack(w) \/ LeaveHint(w) \/ LateHint(w)
    \/ Unlock(w) \/ Park(w) \/ Probe(w) \/ Unprobe(w) \/ Look(w) \/ Send(w)
    \/ Then(w) \/ Acknowledge(w)

(***************************************************************************)
(* What else happens.                                                      *)
(***************************************************************************)

Buried(w, owners) == [k \in AllSlots |-> IF owners[k] = w THEN Gone ELSE owners[k]]

\* The worker dies; the broker keeps what it had in hand.
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

\* The lease of the dead ends.
Expire ==
    /\ \E k \in AllSlots : held[k] = Gone
    /\ held' = [k \in AllSlots |-> IF held[k] = Gone THEN Nobody ELSE held[k]]
    /\ disk' = [disk EXCEPT !.held = [k \in AllSlots |-> IF @[k] = Gone THEN Nobody ELSE @[k]]]
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, row, worker, relay, history, time>>

\* The same at the lock server.
Forget ==
    /\ \E k \in AllSlots : lock[k] = Gone
    /\ lock' = [k \in AllSlots |-> IF lock[k] = Gone THEN Nobody ELSE lock[k]]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, worker, relay, history, time>>

\* Nobody came for whom it was kept.
KeptEnds(k) ==
    /\ lock[k] = Kept
    /\ lock' = [lock EXCEPT ![k] = Nobody]
    /\ Read /\ NoFault
    /\ UNCHANGED <<copies, hint, worker, relay, history, time>>

Flush ==
    /\ Fault("flush")
    /\ lock' = [k \in AllSlots |-> Nobody]
    /\ hint' = [k \in AllKeys |-> FALSE]
    /\ Read
    /\ UNCHANGED <<copies, worker, relay, history, time>>

\* The broker forgets a copy of one who stands in the ledger.
Lose(m) ==
    /\ InLine(m)
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

\* A message's time is over.
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

\* Who was called and is on no way any more does not come in time.
Due(m) ==
    /\ row[m] = "called" /\ ~InBroker(m) /\ relay # m
    /\ ~\E w \in Workers : worker[w].m = m \/ worker[w].send = m
    /\ row' = [row EXCEPT ![m] = "late"]
    /\ UNCHANGED held
    /\ Flushed
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, relay, history, time>>

RelayCalls(k) ==
    LET first == First(k) IN
    /\ Relay /\ relay = 0
    /\ first # 0 /\ Callable(k)
    /\ row' = [row EXCEPT ![first] = "called"]
    /\ relay' = first
    /\ UNCHANGED held
    /\ Unflushed
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, history, time>>

\* It is noted as sent only when it was; until then it is late.
RelayRecalls(m) ==
    /\ Relay /\ relay = 0
    /\ \/ row[m] = "late"
       \/ /\ row[m] = "again" /\ ~InBroker(m)
          /\ ~\E w \in Workers : worker[w].m = m
    /\ row' = [row EXCEPT ![m] = "again"]
    /\ copies' = Added(m, "new")
    /\ UNCHANGED held
    /\ Flushed
    /\ NoFault
    /\ UNCHANGED <<lock, hint, worker, relay, history, time>>

\* It is overdue from then on.
RelayFindsExpired(m) ==
    /\ Relay /\ relay = 0
    /\ row[m] = "waits" /\ m \in time.expired
    /\ row' = [row EXCEPT ![m] = "late"]
    /\ UNCHANGED held
    /\ Flushed
    /\ NoFault
    /\ UNCHANGED <<copies, lock, hint, worker, relay, history, time>>

RelaySends ==
    /\ relay # 0
    /\ copies' = Added(relay, "called")
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
        Step(w) \/ SendLost(w) \/ Crash(w) \/ \E m \in Messages, kind \in Kinds : Receive(w, m, kind)
    \/ \E m \in Messages : Lose(m) \/ Duplicate(m) \/ Due(m) \/ RelayRecalls(m)
    \/ \E m \in Messages : Ends(m) \/ RelayFindsExpired(m)
    \/ \E k \in AllKeys : RelayCalls(k) \/ Opens(k)
    \/ RelaySends \/ RelayDies \/ (\E k \in AllSlots : KeptEnds(k)) \/ Expire \/ Forget \/ Flush \/ DatabaseCrash

Spec == Init /\ [][Next]_vars

Fairness ==
    /\ \A w \in Workers : WF_vars(Step(w)) /\ SF_vars(Admit(w))
    /\ \A m \in Messages, kind \in Kinds : SF_vars(\E w \in Workers : Receive(w, m, kind))
    /\ \A k \in AllSlots : WF_vars(KeptEnds(k))
    /\ \A m \in Messages : WF_vars(Due(m)) /\ SF_vars(RelayRecalls(m))
    /\ \A m \in Messages : SF_vars(RelayFindsExpired(m))
    /\ \A k \in AllKeys : SF_vars(RelayCalls(k)) /\ WF_vars(Opens(k))
    /\ WF_vars(RelaySends) /\ WF_vars(Expire) /\ WF_vars(Forget)

FairSpec == Spec /\ Fairness

(***************************************************************************)
(* What must hold.                                                         *)
(***************************************************************************)

InHand(m) == \E w \in Workers : worker[w].m = m

\* Whatever happens next: a message is in the broker, in a worker's hands, in the ledger, or done;
\* or it will be sent by who has the one before it in a chain.
Stands(m) == InBroker(m) \/ InHand(m) \/ InLine(m) \/ row[m] = "done"
IsToCome(m) ==
    /\ m - 1 \in Chained
    /\ row[m - 1] # "done" \/ InBroker(m - 1) \/ InHand(m - 1) \/ m - 1 \in time.expired
S7 == \A m \in Messages : Stands(m) \/ IsToCome(m)

\* What a queue is told is so: what follows another in a chain comes to nobody before that has ended.
S8 == \A m \in Chained : row[m] = "done" \/ ~Stands(m + 1)

\* Nobody begins while one who came before waits, or is expected.
S9 == ~history.overtaken
\* Of each line as many are expected at a time as may hold its key.
S9One == \A k \in AllKeys : Cardinality(Called(k)) <= Slots

\* Nobody waits for a key that is free while nobody has a delivery of that key in hand; beside
\* those, where it has slots, who hold one of them.
L6 == \A k \in AllKeys :
    \/ ~\E m \in Messages : KeyOf(m) = k /\ InLine(m)
    \/ Cardinality(Taken(k, held)) = Slots
    \/ \E m \in Messages : KeyOf(m) = k /\ InBroker(m)
    \/ \E w \in Workers : worker[w].at \notin {"idle", "body"} /\ KeyOf(worker[w].m) = k

\* Everybody's turn comes.
L1 == <>(\A m \in Messages : row[m] = "done")

Symmetry == Permutations(Workers)
=============================================================================
