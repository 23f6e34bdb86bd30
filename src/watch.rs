//! A hold as it happens: looks when they are due, and tells the log what an operator wants to know.

use std::collections::BTreeMap;
use std::fmt;
use std::mem::replace;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use crate::cli::Settings;
use crate::hold::{Hold, Keeper, Look, Next, Reason, Sight, Terms};
use crate::init::signals::Name;
use crate::log::{Field, Log, Seconds};
use crate::pod::Row;
use crate::pod::kernel::System;
use crate::pod::owners::{Kinds, Owner, Rule};
use crate::pod::snapshot::{Holds, Judged, Observer};
use crate::proxy_api::{ProxyApi, Url};

/// At the start, at most this many listeners are named; with all else a hold of 30 s stays below 100 lines.
const NAMED_LISTENERS: usize = 30;
/// At the start, at most this many connections are named.
const NAMED_CONNECTIONS: usize = 10;
/// At the end, at most this many holders are named.
const NAMED_HOLDERS: usize = 20;
/// Of the rest, this many peer ports are counted by number.
const NAMED_PORTS: usize = 5;
/// The shortest time between two lines about a changed set of listeners; it doubles with every so many lines, or an
/// application that never rests would fill the log.
const CHANGE_PACE: Duration = Duration::from_secs(1);
const CHANGES_AT_PACE: u32 = 5;
/// The time between heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// How often telling Envoy to drain is tried, and the time between two tries.
const DRAIN_TRIES: u32 = 5;
const DRAIN_PAUSE: Duration = Duration::from_secs(1);

/// The time between two glances.
const GLANCE: Duration = Duration::from_millis(10);

/// Looks are made early for as long as the hold has cost less than this part of the time since its start, and of this time
/// more: whoever makes one short connection after another shall not have one look follow another.
const EARLY_SHARE: u32 = 20;
const EARLY_CREDIT: Duration = Duration::from_secs(2);

/// A listener as the log tells it apart: workers of one program are one.
type Listener = (SocketAddr, u32, Owner);

/// A hold under way.
#[derive(Debug)]
pub struct Watch<'a> {
    log: &'a Log,
    observer: Observer<System>,
    hold: Hold,
    timeout: Duration,
    start: Instant,
    /// When the next look is due, since the start.
    due: Duration,
    /// The CPU time that the process had used at the end of the last look.
    spent: Duration,
    /// And before the first.
    spent_before: Duration,
    names: String,
    looked: bool,
    trouble_said: bool,
    listeners: Vec<Listener>,
    /// The application's as the hold began; empty once one of them has closed: it is stopping.
    unmoved: Vec<Listener>,
    change_said: Duration,
    changes_said: u32,
    beat: Duration,
    /// One of the last holders seen, and when.
    last: Option<(Row, Duration)>,
    /// Something of an application's has held.
    application_seen: bool,
    /// What can hold.
    kinds: Kinds,
    drain: Option<Drain>,
    /// When to glance at the few connections that still hold, since the start.
    glance: Option<Duration>,
}

/// Envoy is to be told to drain.
#[derive(Debug)]
struct Drain {
    /// When to try, since the start of the hold.
    at: Duration,
    /// How often that may still fail.
    tries: u32,
    api: ProxyApi,
}

impl<'a> Watch<'a> {
    /// Starts a hold. `child` is the wrapped command's process.
    #[must_use]
    pub fn start(log: &'a Log, settings: &Settings, terms: Terms, child: Option<i32>) -> Watch<'a> {
        // Before anything that may take its time: the timeout counts from the signal.
        let start = Instant::now();
        let spent = cpu_time();
        let rules = &settings.rules;
        let names = rules.proxy.join(",");
        let poll = terms.poll.map_or("auto".into(), |poll| format!("{poll:?}"));
        let [timeout, min_wait, settle] = [terms.timeout, terms.min_wait, terms.settle].map(Seconds);
        let (ports, uids) = (ranges(&rules.ignore_ports), ranges(&rules.ignore_uids));
        let hold = Held(rules.hold);
        let kernel = System::open(settings.source);
        let source = kernel.source().to_string();
        let mut fields: Vec<Field> = vec![
            ("timeout", &timeout),
            ("min_wait", &min_wait),
            ("settle", &settle),
            ("poll", &poll),
            ("hold", &hold),
            ("proxy", &names),
        ];
        if !rules.ignore_ports.is_empty() {
            fields.push(("ignore_port", &ports));
        }
        if !rules.ignore_uids.is_empty() {
            fields.push(("ignore_uid", &uids));
        }
        fields.push(("source", &source));
        log.info("hold started", &fields);
        Watch {
            log,
            observer: Observer::new(kernel, rules.clone(), child),
            hold: Hold::new(terms, if child.is_some() { Keeper::Run } else { Keeper::Hook }),
            timeout: terms.timeout,
            start,
            due: Duration::ZERO,
            spent,
            spent_before: spent,
            names,
            looked: false,
            trouble_said: false,
            listeners: Vec::new(),
            unmoved: Vec::new(),
            change_said: Duration::ZERO,
            changes_said: 0,
            beat: Duration::ZERO,
            last: None,
            application_seen: false,
            kinds: rules.hold,
            glance: None,
            drain: settings.drain.map(|at| Drain { at, tries: DRAIN_TRIES, api: ProxyApi::new() }),
        }
    }

    /// How long it is until there is something to do.
    #[must_use]
    pub fn time_left(&self) -> Duration {
        let drain = self.drain.as_ref().map(|drain| drain.at);
        let due = [drain, self.glance].into_iter().flatten().fold(self.due, Duration::min);
        due.saturating_sub(self.start.elapsed())
    }

    /// Whether a hold that ended clear has left pilot-agent nothing to drain: an application was seen and is gone, and
    /// connections and undelivered bytes were looked at. Where none was seen (a gateway, an application behind a unix
    /// socket), requests may be in flight that no socket of an application's shows.
    #[must_use]
    pub fn nothing_to_drain(&self) -> bool {
        let hidden = self.observer.unreadable().iter().any(|(_, uid)| *uid == 0);
        self.application_seen && self.kinds.connections && self.kinds.undelivered && !hidden
    }

    /// The Envoys that pilot-agent has started.
    pub fn agents_envoys(&self) -> impl Iterator<Item = i32> {
        let proxies = &self.observer.view().proxies;
        let is_agent = |pid| proxies.iter().any(|proxy| proxy.pid == pid && proxy.name == "pilot-agent");
        proxies
            .iter()
            .filter(move |proxy| proxy.name == "envoy" && is_agent(proxy.parent))
            .map(|proxy| proxy.pid)
    }

    /// Tells Envoy to drain, if it is time to. A failure is tried again a few times and changes nothing else.
    fn drain_if_due(&mut self) {
        let Some(drain) = self.drain.as_mut().filter(|drain| drain.at <= self.start.elapsed()) else {
            return;
        };
        match drain.api.tell(&Url::envoy_drain()) {
            Ok(()) => {
                self.log.info("Envoy drains: it asks its clients to leave and goes on accepting", &[]);
                self.drain = None;
            }
            Err(error) => {
                drain.tries = drain.tries.saturating_sub(1);
                drain.at = self.start.elapsed().saturating_add(DRAIN_PAUSE);
                self.log
                    .warn("cannot tell Envoy to drain", &[("error", &error), ("tries_left", &drain.tries)]);
                if drain.tries == 0 {
                    self.drain = None;
                }
            }
        }
    }

    /// Whether a signal ends the hold.
    #[must_use]
    pub fn signal(&self, number: i32) -> Option<Reason> {
        self.hold.signal(number)
    }

    /// Does what is due, a look above all; says why the hold ends, if it does.
    pub fn look_if_due(&mut self) -> Option<Reason> {
        self.drain_if_due();
        let begin = self.start.elapsed();
        if begin < self.due && !self.glance_says_now(begin) {
            return None;
        }
        // The heartbeat counts the holders, and those left at the timeout are named: as they are now.
        let for_the_log = begin >= self.timeout || begin.saturating_sub(self.beat) >= HEARTBEAT;
        let view = if for_the_log { self.observer.look_at_all(begin) } else { self.observer.look(begin) };
        let proxy = view.proxy();
        let sight = self.observer.sight();
        let spent = cpu_time();
        let cost = spent.saturating_sub(replace(&mut self.spent, spent));
        let end = self.start.elapsed();
        self.tell(end);
        self.glance = (sight == Sight::Held).then(|| end.saturating_add(GLANCE));
        match self.hold.observe(Look { begin, end, cost, sight, proxy }) {
            Next::LookAt(due) => {
                self.due = due;
                None
            }
            Next::Release(reason) => Some(reason),
        }
    }

    /// Between two looks, which may be dear, the few connections that are left are asked for one by one: so the end of
    /// the last is noticed at once. The look that follows confirms it.
    fn glance_says_now(&mut self, now: Duration) -> bool {
        if self.glance.is_none_or(|at| now < at) {
            return false;
        }
        let spent = self.spent.saturating_sub(self.spent_before);
        if spent.saturating_mul(EARLY_SHARE) > now.saturating_add(EARLY_CREDIT) {
            self.glance = None;
            return false;
        }
        let changed = self.observer.glance();
        self.glance = changed.map(|_| now.saturating_add(GLANCE));
        changed == Some(true)
    }

    /// Tells how the hold ended.
    pub fn released(&self, reason: Reason) {
        let after = Seconds(self.start.elapsed());
        let view = self.observer.view();
        let holders = view.holders().count();
        let mut fields: Vec<Field> = vec![("reason", &reason), ("after", &after)];
        match &view.trouble {
            // What is not known is not nothing.
            Some(trouble) => fields.push(("error", trouble)),
            None => fields.push(("holders", &holders)),
        }
        let last = self.last.map(|(row, seen)| (row, Seconds(seen)));
        if let (0, Some((row, seen))) = (holders, &last) {
            fields.extend([("last_holder", row as _), ("last_seen", seen as _)]);
        }
        let signal = if let Reason::Signal(number) = reason { Some(Name(number)) } else { None };
        if let Some(name) = &signal {
            fields.push(("signal", name));
        }
        match reason {
            Reason::Timeout => {
                self.log.warn("hold released", &fields);
                if !self.unmoved.is_empty() {
                    self.log.warn(
                        "the application listens as at the start: it does not stop, or only the proxy's container was \
                         stopped, as by a failed probe",
                        &[("listeners", &self.unmoved.len())],
                    );
                }
            }
            Reason::ProxyGone if self.hold.proxy_was_seen() => self.log.info("hold released", &fields),
            Reason::ProxyGone => {
                fields.push(("proxy", &self.names));
                self.log.warn("hold released: no process has one of the proxy's names", &fields);
            }
            _ => self.log.info("hold released", &fields),
        }
        for (holder, kind) in view.holders().take(NAMED_HOLDERS) {
            self.log.info(&holder.row.to_string(), &[("left", &kind)]);
        }
        let mut stalled = view.sockets.iter().filter(|socket| socket.stalled);
        if let Some(first) = stalled.next() {
            let count = stalled.count().saturating_add(1);
            self.log.warn(
                "undelivered bytes are given up: they have not moved for 5 s",
                &[("sockets", &count), ("first", &first.row)],
            );
        }
    }

    /// Tells of the look just made what has not been told.
    fn tell(&mut self, now: Duration) {
        let view = self.observer.view();
        if let (Some(trouble), false) = (&view.trouble, self.trouble_said) {
            self.trouble_said = true;
            let fields: [Field; 1] = [("error", &trouble)];
            self.log.warn("cannot look: what is not known is taken to hold until the timeout", &fields);
        }
        if let Some(holder) = self.observer.holder() {
            self.last = Some((holder, now));
        }
        if !self.observer.saw_all() {
            // The view is the one told of before, and may be of 9,000 sockets.
            return;
        }
        self.application_seen |= view.holders().any(|(_, kind)| kind != Holds::Undelivered);
        let mut listeners: Vec<Listener> = view
            .sockets
            .iter()
            .filter(|socket| socket.row.listens())
            .map(|socket| (socket.row.local, socket.row.uid, socket.owner))
            .collect();
        listeners.sort_unstable();
        listeners.dedup();
        if !self.looked {
            self.looked = true;
            self.tell_everything();
            let applications = listeners.iter().filter(|(.., owner)| *owner == Owner::Application);
            self.unmoved = applications.copied().collect();
            self.listeners = listeners;
            return;
        }
        if self.unmoved.iter().any(|listener| listeners.binary_search(listener).is_err()) {
            self.unmoved.clear();
        }
        let doublings = self.changes_said.checked_div(CHANGES_AT_PACE).unwrap_or_default();
        let pace = CHANGE_PACE.saturating_mul(2_u32.saturating_pow(doublings));
        if listeners != self.listeners && now.saturating_sub(self.change_said) >= pace {
            self.change_said = now;
            self.changes_said = self.changes_said.saturating_add(1);
            let added = difference(&listeners, &self.listeners);
            let removed = difference(&self.listeners, &listeners);
            let after = Seconds(now);
            let fields: [Field; 3] = [("added", &added), ("removed", &removed), ("after", &after)];
            self.log.info("listeners changed", &fields);
            self.listeners = listeners;
        }
        if now.saturating_sub(self.beat) >= HEARTBEAT {
            self.beat = now;
            self.tell_counts("still holding", now);
        }
    }

    /// The first look by name, and how owners were told.
    fn tell_everything(&self) {
        let view = self.observer.view();
        for (process, uid) in self.observer.unreadable() {
            let how = if *uid == 0 {
                "the proxy's sockets are known by the reserved ports, and only listeners hold"
            } else {
                "sockets of its uid are taken for the proxy's"
            };
            let (pid, name) = (process.pid, &process.name);
            let fields: [Field; 4] = [("pid", &pid), ("name", &name), ("uid", &uid), ("so", &how)];
            self.log.warn("a proxy process hides its fds", &fields);
        }
        let mut rules: Vec<Rule> = view.sockets.iter().map(|socket| socket.rule).collect();
        rules.sort_unstable();
        rules.dedup();
        let rules = rules.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let processes = view.proxies.iter().map(|proxy| format!("{} {}", proxy.name, proxy.pid));
        let processes = processes.take(NAMED_HOLDERS).collect::<Vec<_>>().join(",");
        self.log.info("owners", &[("rules", &rules), ("proxy", &processes)]);

        let mut listeners: BTreeMap<(bool, Listener), (Judged, usize)> = BTreeMap::new();
        for socket in view.sockets.iter().filter(|socket| socket.row.listens()) {
            let key = (socket.holds.is_none(), (socket.row.local, socket.row.uid, socket.owner));
            let (_, count) = listeners.entry(key).or_insert((*socket, 0));
            *count = count.saturating_add(1);
        }
        for (socket, count) in listeners.values().take(NAMED_LISTENERS) {
            let mut fields: Vec<Field> = vec![("owner", &socket.owner), ("rule", &socket.rule)];
            if *count > 1 {
                fields.push(("sockets", count));
            }
            self.log.info(&socket.row.to_string(), &fields);
        }
        let rest = listeners.len().saturating_sub(NAMED_LISTENERS);
        if rest > 0 {
            self.log.info("more listeners", &[("count", &rest)]);
        }
        let named = view.holders().filter(|(socket, _)| !socket.row.listens()).take(NAMED_CONNECTIONS);
        let named: Vec<_> = named.collect();
        for (socket, kind) in &named {
            self.log.info(&socket.row.to_string(), &[("owner", &socket.owner), ("holds", kind)]);
        }
        let mut rest: BTreeMap<Owner, BTreeMap<u16, usize>> = BTreeMap::new();
        let is_named = |socket: &Judged| named.iter().any(|(named, _)| named.row == socket.row);
        for socket in view.sockets.iter().filter(|socket| !socket.row.listens() && !is_named(socket)) {
            let count = rest.entry(socket.owner).or_default().entry(socket.row.remote.port()).or_default();
            *count = count.saturating_add(1);
        }
        for (owner, ports) in rest {
            let count: usize = ports.values().sum();
            let ports = Ports(ports);
            let fields: [Field; 3] = [("owner", &owner), ("count", &count), ("peer_ports", &ports)];
            self.log.info("more connections", &fields);
        }
    }

    fn tell_counts(&self, message: &str, now: Duration) {
        let view = self.observer.view();
        let after = Seconds(now);
        let [listeners, connections, undelivered] = &view.counts();
        let mut fields: Vec<Field> = vec![("after", &after), ("listeners", listeners)];
        if view.complete {
            fields.extend([("connections", connections as _), ("undelivered", undelivered as _)]);
        }
        if let Some(trouble) = &view.trouble {
            fields.push(("error", trouble));
        }
        self.log.info(message, &fields);
    }
}

/// The CPU time that the process has used. Not wall time: on a busy machine a look takes long and costs little.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// What the one has and the other has not, as `0.0.0.0:8080,[::]:8081`.
fn difference(one: &[Listener], other: &[Listener]) -> String {
    let more: Vec<_> = one.iter().filter(|listener| other.binary_search(listener).is_err()).collect();
    let mut names: Vec<_> = more.iter().take(NAMED_LISTENERS).map(|(local, ..)| local.to_string()).collect();
    if more.len() > names.len() {
        names.push(format!("{} more", more.len().saturating_sub(names.len())));
    }
    names.join(",")
}

/// Ranges as they are given: `8080,9000-9099`.
fn ranges<T: fmt::Display + PartialEq>(ranges: &[RangeInclusive<T>]) -> String {
    let one = |range: &RangeInclusive<T>| match (range.start(), range.end()) {
        (start, end) if start == end => start.to_string(),
        (start, end) => format!("{start}-{end}"),
    };
    ranges.iter().map(one).collect::<Vec<_>>().join(",")
}

struct Held(Kinds);

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kinds { listeners, connections, undelivered } = self.0;
        let kinds = [(listeners, "listeners"), (connections, "connections"), (undelivered, "undelivered")];
        let kinds: Vec<_> = kinds.iter().filter(|(held, _)| *held).map(|(_, name)| *name).collect();
        f.write_str(&kinds.join(","))
    }
}

/// Counts by port, the most first: `5432x8000,6379x990,other x12`.
struct Ports(BTreeMap<u16, usize>);

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ports: Vec<_> = self.0.iter().collect();
        ports.sort_by_key(|(port, count)| (std::cmp::Reverse(**count), **port));
        let rest: usize = ports.iter().skip(NAMED_PORTS).map(|(_, count)| **count).sum();
        let mut names: Vec<_> =
            ports.iter().take(NAMED_PORTS).map(|(port, count)| format!("{port}x{count}")).collect();
        if rest > 0 {
            names.push(format!("otherx{rest}"));
        }
        f.write_str(&names.join(","))
    }
}
