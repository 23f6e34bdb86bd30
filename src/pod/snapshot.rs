//! One look at the Pod: rows, owners and holders brought together, with what earlier looks have learnt.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{self, ErrorKind};
use std::mem::take;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::time::Duration;

use super::kernel::{Kernel, Scope, Visible, own_pid};
use super::owners::{Evidence, Owner, Rule, Rules, decide, orphan_owes, proxy_owes, same_container};
use super::{Row, State};
use crate::hold::{Proxy, Sight};

/// Undelivered bytes that have not changed for this long are stalled: their receiver is gone.
const STALLED: Duration = Duration::from_secs(5);

/// At most this many connections are asked for one by one.
const GLANCE_MOST: usize = 8;

/// Of the sockets that hold, this many are asked for again.
const WITNESSES: usize = 8;

/// While a holder that is known is still there nothing else decides, and the rest is looked at for the log alone: so often
/// while a listener holds, and so often where only connections do, which may be many.
const LISTENERS_EVERY: Duration = Duration::from_secs(2);
const ALL_EVERY: Duration = Duration::from_secs(10);

/// As what a socket holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// An application's listener.
    Listener,
    /// An application's connection.
    Connection,
    /// Bytes that the proxy still has to pass on.
    Undelivered,
}

impl fmt::Display for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Holds::Listener => "listener",
            Holds::Connection => "connection",
            Holds::Undelivered => "undelivered",
        })
    }
}

/// A socket with its owner and the verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judged {
    /// The socket.
    pub row: Row,
    /// Whose it is.
    pub owner: Owner,
    /// Which rule said so.
    pub rule: Rule,
    /// Whether it holds, and as what.
    pub holds: Option<Holds>,
    /// It has undelivered bytes that have not changed for so long that they hold no longer.
    pub stalled: bool,
}

/// What a look saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The sockets that matter; only the listeners unless it is complete.
    pub sockets: Vec<Judged>,
    /// Whether connections were read too.
    pub complete: bool,
    /// What could not be read.
    pub trouble: Option<String>,
    /// The proxy's processes.
    pub proxies: Vec<Visible>,
    /// PID 1 is in the process list.
    pub init_visible: bool,
}

impl View {
    /// Whether anything holds.
    #[must_use]
    pub fn sight(&self) -> Sight {
        if self.trouble.is_some() {
            Sight::Unknown
        } else if self.holders().next().is_some() {
            Sight::Held
        } else {
            Sight::Clear
        }
    }

    /// What holds, and as what.
    pub fn holders(&self) -> impl Iterator<Item = (&Judged, Holds)> {
        self.sockets.iter().filter_map(|socket| Some((socket, socket.holds?)))
    }

    /// How many listeners, connections and undelivered ones hold.
    #[must_use]
    pub fn counts(&self) -> [usize; 3] {
        [Holds::Listener, Holds::Connection, Holds::Undelivered]
            .map(|kind| self.holders().filter(|(_, holds)| *holds == kind).count())
    }

    /// Whether there is a proxy.
    #[must_use]
    pub fn proxy(&self) -> Proxy {
        match (self.proxies.is_empty(), self.init_visible) {
            (false, _) => Proxy::Alive,
            (true, true) => Proxy::Gone,
            (true, false) => Proxy::Unknown,
        }
    }
}

/// The proxy's processes: those with its names, and the wrapped command's own.
///
/// Where the Pod shares one PID namespace, the application may have processes of that name too. They are told apart
/// by control group, but only where that leaves any, the command's own process aside: a container that keeps its proxy
/// or outlast in a group of its own is odd, a proxy that is overlooked loses requests or holds until the timeout.
pub fn proxies_among(
    kernel: &mut impl Kernel,
    processes: &[Visible],
    rules: &Rules,
    child: Option<i32>,
) -> Vec<Visible> {
    let is_proxy = |process: &&Visible| rules.names(&process.name) || Some(process.pid) == child;
    let named: Vec<Visible> = processes.iter().filter(is_proxy).cloned().collect();
    if named.len() < 2 {
        return named;
    }
    let Some(own) = kernel.control_groups(own_pid()) else { return named };
    let is_ours = |process: &&Visible| {
        kernel.control_groups(process.pid).is_none_or(|other| same_container(&own, &other))
    };
    let ours: Vec<i32> = named.iter().filter(is_ours).map(|process| process.pid).collect();
    if ours.is_empty() {
        return named;
    }
    named.into_iter().filter(|process| Some(process.pid) == child || ours.contains(&process.pid)).collect()
}

/// What is known of an inode. Its addresses tell a reused number from the old one.
#[derive(Debug)]
struct Known {
    local: SocketAddr,
    remote: SocketAddr,
    owner: Owner,
    rule: Rule,
    /// Looked up twice, where no proxy process held it the first time.
    believed: bool,
    /// The look that last saw it.
    seen: u64,
}

impl Known {
    fn is_of(&self, row: &Row) -> bool {
        (self.local, self.remote) == (row.local, row.remote)
    }
}

/// Undelivered bytes as they last changed.
#[derive(Debug)]
struct Owed {
    state: State,
    queues: (u32, u32),
    since: Duration,
    seen: u64,
}

/// Looks at the Pod again and again.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is of one look, or says of which kind the looks are")]
pub struct Observer<K> {
    kernel: K,
    rules: Rules,
    /// The wrapped command's process, a proxy whatever its name.
    child: Option<i32>,
    known: HashMap<u64, Known>,
    owed: HashMap<(SocketAddr, SocketAddr, u64), Owed>,
    /// Proxy processes whose fd table cannot be read, with their effective uid.
    unreadable: Vec<(Visible, u32)>,
    /// Effective uids of the proxy's processes, if all of them are known.
    proxy_uids: Option<Vec<u32>>,
    view: View,
    /// Some of the application's sockets that held when all was looked at, and until when they are enough.
    witnesses: Vec<Row>,
    enough_until: Duration,
    /// One that held in the last look.
    holder: Option<Row>,
    /// How many held when all was looked at, which the last look may have done.
    holders: usize,
    saw_all: bool,
    /// Counts the looks.
    look: u64,
    /// The process list was read in this look.
    listed: bool,
    /// The last look in which new sockets were looked up.
    learnt: u64,
    /// Keep also the rows that can never hold.
    everything: bool,
}

impl<K: Kernel> Observer<K> {
    /// An observer that has seen nothing yet.
    #[must_use]
    pub fn new(kernel: K, rules: Rules, child: Option<i32>) -> Observer<K> {
        Observer {
            kernel,
            rules,
            child,
            known: HashMap::new(),
            owed: HashMap::new(),
            unreadable: Vec::new(),
            proxy_uids: None,
            view: View::default(),
            witnesses: Vec::new(),
            enough_until: Duration::ZERO,
            holder: None,
            holders: 0,
            saw_all: false,
            look: 0,
            listed: false,
            learnt: 0,
            everything: false,
        }
    }

    /// Shows also the sockets that can never hold: for a person.
    #[must_use]
    pub fn with_everything(mut self) -> Observer<K> {
        self.everything = true;
        self
    }

    /// Proxy processes whose fd table cannot be read, with their effective uid.
    #[must_use]
    pub fn unreadable(&self) -> &[(Visible, u32)] {
        &self.unreadable
    }

    /// One of those that held in the last look.
    #[must_use]
    pub fn holder(&self) -> Option<Row> {
        self.holder
    }

    /// Whether anything holds, as the view says, without going through all of it.
    #[must_use]
    pub fn sight(&self) -> Sight {
        match (&self.view.trouble, self.holder) {
            (Some(_), _) => Sight::Unknown,
            (None, Some(_)) => Sight::Held,
            (None, None) => Sight::Clear,
        }
    }

    /// Whether the last look saw all, or one that still holds was enough for it.
    #[must_use]
    pub fn saw_all(&self) -> bool {
        self.saw_all
    }

    /// What the last look saw.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Looks. `now` is the time since the hold's start.
    ///
    /// While a holder is known to be still there, nothing else decides, and the view is that of a few seconds ago.
    /// While a listener holds, connections are not read at all: it is they that are many.
    pub fn look(&mut self, now: Duration) -> &View {
        if now < self.enough_until
            && self.proxies_live()
            && let Some(witness) = self.witness()
        {
            self.holder = Some(witness);
            self.saw_all = false;
            // What was not looked at may have changed: its time starts again.
            self.owed.clear();
            return &self.view;
        }
        self.look_at_all(now)
    }

    /// Looks, and sees all that holds as it is now, but for connections while a listener holds.
    pub fn look_at_all(&mut self, now: Duration) -> &View {
        let connections_hold = self.rules.hold.connections || self.rules.hold.undelivered;
        let listener_held = self.view.holders().any(|(_, holds)| holds == Holds::Listener);
        self.look = self.look.saturating_add(1);
        self.listed = false;
        self.view.trouble = None;
        self.view.complete = connections_hold && !listener_held;
        // A list is only made where there is something new. That its processes live is cheap to see.
        if !self.proxies_live() {
            self.note(Self::list_proxies);
        }
        let mut sockets = take(&mut self.view.sockets);
        loop {
            self.note(|observer| observer.judge(&mut sockets, now));
            let held = sockets.iter().any(|socket| socket.holds.is_some());
            if held || self.view.complete || !connections_hold {
                break;
            }
            self.view.complete = true;
        }
        let (look, complete) = (self.look, self.view.complete);
        // It only grows where something is new; else there is no need to go through all connections.
        if complete || self.learnt == look {
            self.known.retain(|_, known| known.seen == look || (!complete && known.remote.port() != 0));
        }
        // What was not looked at may have changed: its time starts again.
        self.owed.retain(|_, owed| owed.seen == look);
        self.view.sockets = sockets;
        self.choose_witnesses(now);
        &self.view
    }

    fn proxies_live(&mut self) -> bool {
        let kernel = &mut self.kernel;
        !self.view.proxies.is_empty() && self.view.proxies.iter().all(|proxy| kernel.lives(proxy))
    }

    /// One of the witnesses that is still there. An error is for the look at all to find.
    fn witness(&mut self) -> Option<Row> {
        if self.witnesses.is_empty() { None } else { self.kernel.first_there(&self.witnesses).ok()? }
    }

    /// The first in the tables, which is found at once there, and the oldest, which are the last to go: those with the
    /// lowest inodes.
    fn choose_witnesses(&mut self, now: Duration) {
        let listener_held = self.view.holders().any(|(_, holds)| holds == Holds::Listener);
        self.enough_until = now.saturating_add(if listener_held { LISTENERS_EVERY } else { ALL_EVERY });
        self.witnesses.clear();
        let known = self.view.trouble.is_none();
        let holding = self.view.holders().filter(|(_, holds)| known && *holds != Holds::Undelivered);
        for row in holding.map(|(socket, _)| socket.row) {
            if self.witnesses.len() < WITNESSES {
                self.witnesses.push(row);
            } else if let Some(youngest) =
                self.witnesses.iter_mut().skip(1).max_by_key(|witness| witness.inode)
                && row.inode < youngest.inode
            {
                *youngest = row;
            }
        }
        self.holder = self.view.holders().next().map(|(socket, _)| socket.row);
        self.holders = self.view.holders().count();
        self.saw_all = true;
    }

    /// Whether one of the few connections that still hold has changed since the last look, or of many all that were
    /// asked for are gone: so that the next look is worth making now. None where the kernel cannot be asked for one.
    pub fn glance(&mut self) -> Option<bool> {
        if !self.view.complete || self.view.trouble.is_some() {
            return None;
        }
        if self.holders > GLANCE_MOST && !self.witnesses.is_empty() {
            for witness in &self.witnesses {
                let now = self.kernel.find(witness)?.ok()?;
                if now.is_some_and(|now| witness.is_socket_of(&now)) {
                    return Some(false);
                }
            }
            return Some(true);
        }
        for (socket, holds) in self.view.holders() {
            let now = self.kernel.find(&socket.row)?.ok()?;
            let still = now.is_some_and(|now| {
                socket.row.is_socket_of(&now)
                    && match (holds, socket.owner) {
                        (Holds::Undelivered, Owner::Nobody) => orphan_owes(&now),
                        (Holds::Undelivered, _) => proxy_owes(&now),
                        (Holds::Listener | Holds::Connection, _) => true,
                    }
            });
            if !still {
                return Some(true);
            }
        }
        Some(false)
    }

    /// What goes wrong makes the look unknown, not the hold shorter.
    fn note(&mut self, work: impl FnOnce(&mut Self) -> io::Result<()>) {
        if let Err(error) = work(self) {
            self.view.trouble = Some(error.to_string());
        }
    }

    fn list_proxies(&mut self) -> io::Result<()> {
        self.listed = true;
        let before = take(&mut self.view.proxies);
        self.view.init_visible = false;
        let processes = self.kernel.processes();
        if let Ok(processes) = &processes {
            self.view.init_visible = processes.iter().any(|process| process.pid == 1);
            self.view.proxies = proxies_among(&mut self.kernel, processes, &self.rules, self.child);
        }
        if self.view.proxies != before {
            // A proxy that has come or gone changes whose its sockets are.
            self.known.clear();
            self.unreadable.clear();
            let kernel = &mut self.kernel;
            self.proxy_uids =
                self.view.proxies.iter().map(|proxy| kernel.effective_uid(proxy.pid).ok()).collect();
        }
        processes.map(drop)
    }

    /// Reads the rows and judges them; twice, where something is not believed yet and nothing else holds, or nothing
    /// has been told yet.
    fn judge(&mut self, sockets: &mut Vec<Judged>, now: Duration) -> io::Result<()> {
        let read = self.read(sockets);
        let fresh = self.learn(sockets, false)?;
        self.give_verdicts(sockets, now);
        if fresh && (self.look == 1 || !sockets.iter().any(|socket| socket.holds.is_some())) {
            self.read(sockets)?;
            self.learn(sockets, true)?;
            self.give_verdicts(sockets, now);
        }
        read
    }

    /// The rows that matter, not judged yet. An error leaves those before it.
    fn read(&mut self, sockets: &mut Vec<Judged>) -> io::Result<()> {
        sockets.clear();
        let everything = self.everything;
        let scope = match (self.view.complete, everything) {
            (false, _) => Scope::Listeners,
            (true, false) => Scope::ThatMatter,
            (true, true) => Scope::All,
        };
        self.kernel.rows(scope, &mut |row| {
            if everything || row.listens() || row.inode != 0 || orphan_owes(&row) {
                sockets.push(Judged {
                    row,
                    owner: Owner::Nobody,
                    rule: Rule::NoInode,
                    holds: None,
                    stalled: false,
                });
            }
        })
    }

    /// Looks up the inodes that are new; says whether any of them is not believed yet.
    ///
    /// A proxy's socket that closes between the reading of rows and of fds looks like an application's. So one that no
    /// proxy holds is believed when it is seen again; but at once where its uid is no proxy's, and in a second reading:
    /// an application that makes one short connection after another shows each of them only once.
    fn learn(&mut self, sockets: &[Judged], second: bool) -> io::Result<bool> {
        let look = self.look;
        let mut new: HashSet<u64> = HashSet::new();
        for Judged { row, .. } in sockets.iter().filter(|socket| socket.row.inode != 0) {
            match self.known.get_mut(&row.inode).filter(|known| known.is_of(row)) {
                Some(known) => {
                    known.seen = look;
                    if !known.believed {
                        new.insert(row.inode);
                    }
                }
                None => {
                    new.insert(row.inode);
                }
            }
        }
        if new.is_empty() {
            return Ok(false);
        }
        self.learnt = look;
        if !self.listed {
            self.list_proxies()?;
            if self.known.is_empty() {
                return self.learn(sockets, second);
            }
        }
        let evidence = self.gather(&new)?;
        let mut fresh = false;
        for Judged { row, .. } in sockets.iter().filter(|socket| new.contains(&socket.row.inode)) {
            let again = self.known.get(&row.inode).is_some_and(|known| known.is_of(row));
            let (owner, rule) = decide(row, &self.rules, &evidence);
            let foreign = self.proxy_uids.as_ref().is_some_and(|uids| !uids.contains(&row.uid));
            let believed = rule != Rule::Other || again || second || foreign;
            fresh |= !believed;
            let (local, remote, seen) = (row.local, row.remote, look);
            self.known.insert(row.inode, Known { local, remote, owner, rule, believed, seen });
        }
        Ok(fresh)
    }

    /// Reads the fd tables of the proxy's processes and our own, until all that are `wanted` are found.
    fn gather(&mut self, wanted: &HashSet<u64>) -> io::Result<Evidence> {
        let mut evidence = Evidence::default();
        self.unreadable.clear();
        let collect = |inode, into: &mut HashSet<u64>| {
            if wanted.contains(&inode) {
                into.insert(inode);
            }
            if into.len() == wanted.len() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        for proxy in &self.view.proxies {
            match self.kernel.sockets_of(proxy.pid, &mut |inode| collect(inode, &mut evidence.proxy)) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    match self.kernel.effective_uid(proxy.pid) {
                        Ok(uid) => {
                            evidence.unreadable.push(uid);
                            self.unreadable.push((proxy.clone(), uid));
                        }
                        // It ended meanwhile: its sockets are closed, and the second look-up finds them gone.
                        Err(error) if error.kind() == ErrorKind::NotFound => {}
                        Err(error) => return Err(error),
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.kernel.sockets_of(own_pid(), &mut |inode| collect(inode, &mut evidence.own))?;
        Ok(evidence)
    }

    /// Gives every socket its owner and says whether it holds.
    fn give_verdicts(&mut self, sockets: &mut [Judged], now: Duration) {
        let none = Evidence::default();
        let only_ports_tell = self.unreadable.iter().any(|(_, uid)| *uid == 0);
        for socket in sockets {
            let mut believed = true;
            (socket.owner, socket.rule) = match self.known.get(&socket.row.inode) {
                Some(known) => {
                    believed = known.believed;
                    (known.owner, known.rule)
                }
                None => decide(&socket.row, &self.rules, &none),
            };
            let hold = self.rules.hold;
            let row = &socket.row;
            socket.holds = match socket.owner {
                Owner::Application if !believed => None,
                Owner::Application if row.listens() => hold.listeners.then_some(Holds::Listener),
                Owner::Application => (hold.connections && !only_ports_tell).then_some(Holds::Connection),
                Owner::Proxy | Owner::Nobody => {
                    let owes = if socket.owner == Owner::Nobody { orphan_owes(row) } else { proxy_owes(row) };
                    let owes = owes && hold.undelivered && !only_ports_tell;
                    socket.stalled = owes && self.stalled(row, now);
                    (owes && !socket.stalled).then_some(Holds::Undelivered)
                }
                Owner::Ignored => None,
            };
        }
    }

    /// Whether undelivered bytes have not changed for too long.
    fn stalled(&mut self, row: &Row, now: Duration) -> bool {
        let queues = (row.send_queue, row.receive_queue);
        let fresh = Owed { state: row.state, queues, since: now, seen: self.look };
        let owed = self.owed.entry((row.local, row.remote, row.inode)).or_insert(fresh);
        owed.seen = self.look;
        if (owed.state, owed.queues) != (row.state, queues) {
            (owed.state, owed.queues, owed.since) = (row.state, queues, now);
        }
        now.saturating_sub(owed.since) >= STALLED
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::owners::tests::{row, rules};
    use proptest::prelude::*;
    use std::collections::{HashSet, VecDeque};

    /// A kernel that plays a script: each reading of the rows takes the next scene, the last one stays.
    #[derive(Debug, Default)]
    struct Script {
        scenes: VecDeque<Scene>,
        /// Rows given out, readings of fd tables.
        rows_read: usize,
        fd_tables_read: usize,
        groups: HashMap<i32, &'static str>,
    }

    #[derive(Clone, Debug, Default)]
    struct Scene {
        rows: Vec<Row>,
        envoy: HashSet<u64>,
        envoy_gone: bool,
        unreadable_as: Option<u32>,
        broken: bool,
    }

    impl Script {
        fn scene(&mut self) -> &Scene {
            self.scenes.front().unwrap()
        }
    }

    impl Kernel for &mut Script {
        fn rows(&mut self, scope: Scope, each: &mut dyn FnMut(Row)) -> io::Result<()> {
            let scene = self.scene().clone();
            if self.scenes.len() > 1 {
                self.scenes.pop_front();
            }
            let rows = scene.rows.into_iter().filter(|row| scope != Scope::Listeners || row.listens());
            for row in rows {
                self.rows_read += 1;
                each(row);
            }
            if scene.broken { Err(io::Error::other("row 17 is odd")) } else { Ok(()) }
        }

        fn processes(&mut self) -> io::Result<Vec<Visible>> {
            let visible = |pid, name: &str| Visible { pid, parent: 0, name: name.into() };
            let mut all = vec![visible(1, "init")];
            if !self.scene().envoy_gone {
                all.push(visible(7, "envoy"));
            }
            Ok(all)
        }

        fn find(&mut self, row: &Row) -> Option<io::Result<Option<Row>>> {
            let rows = &self.scene().rows;
            Some(Ok(rows.iter().find(|now| (now.local, now.remote) == (row.local, row.remote)).copied()))
        }

        fn first_there(&mut self, sockets: &[Row]) -> io::Result<Option<Row>> {
            let rows = &self.scene().rows;
            Ok(rows.iter().find(|row| sockets.iter().any(|socket| socket.is_socket_of(row))).copied())
        }

        fn lives(&mut self, process: &Visible) -> bool {
            process.pid == 1 || !self.scene().envoy_gone
        }

        fn sockets_of(&mut self, pid: i32, each: &mut dyn FnMut(u64) -> ControlFlow<()>) -> io::Result<()> {
            if pid == 7 {
                self.fd_tables_read += 1;
                if self.scene().unreadable_as.is_some() {
                    return Err(ErrorKind::PermissionDenied.into());
                }
                let _ = self.scene().envoy.iter().copied().try_for_each(each);
            }
            Ok(())
        }

        fn effective_uid(&mut self, _: i32) -> io::Result<u32> {
            Ok(self.scene().unreadable_as.unwrap_or(1337))
        }

        fn control_groups(&mut self, pid: i32) -> Option<String> {
            self.groups.get(&pid).map(|group| format!("0::{group}\n"))
        }
    }

    fn listener(port: u16, uid: u32, inode: u64) -> Row {
        row(&format!("0.0.0.0:{port}"), "0.0.0.0:0", State::Listen, uid, inode)
    }

    fn connection(port: u16, uid: u32, inode: u64) -> Row {
        row(&format!("10.0.0.1:{port}"), "10.0.0.2:4000", State::Established, uid, inode)
    }

    fn scene(rows: &[Row], envoy: &[u64]) -> Scene {
        Scene { rows: rows.to_vec(), envoy: envoy.iter().copied().collect(), ..Scene::default() }
    }

    fn script(scenes: impl IntoIterator<Item = Scene>) -> Script {
        Script { scenes: scenes.into_iter().collect(), ..Script::default() }
    }

    fn holds(view: &View) -> Vec<(u64, Holds)> {
        view.holders().map(|(socket, holds)| (socket.row.inode, holds)).collect()
    }

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn the_applications_listener_holds_and_then_its_connection() {
        let envoy = listener(15006, 1337, 70);
        let (listen, connect) = (listener(8080, 1000, 1), connection(8080, 1000, 2));
        let mut script = script([scene(&[envoy, listen, connect], &[70]), scene(&[envoy, connect], &[70])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        let view = observer.look_at_all(S);
        assert_eq!(holds(view), [(1, Holds::Listener), (2, Holds::Connection)]);
        assert_eq!((view.sight(), view.proxy()), (Sight::Held, Proxy::Alive));
        let view = observer.look_at_all(S * 2);
        assert_eq!(holds(view), [(2, Holds::Connection)]);
        assert!(view.complete);
    }

    #[test]
    fn connections_are_not_read_while_a_listener_holds() {
        let rows: Vec<Row> = std::iter::once(listener(8080, 1000, 1))
            .chain((2..1_000).map(|n| connection(8080, 1000, n)))
            .collect();
        let mut script = script([scene(&rows, &[])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        observer.look(S);
        let before = observer.kernel.rows_read;
        assert_eq!(holds(observer.look_at_all(S * 2)), [(1, Holds::Listener)]);
        assert_eq!(observer.kernel.rows_read - before, 1);
    }

    #[test]
    fn fd_tables_are_read_for_new_inodes_only() {
        let rows = [listener(15006, 1337, 70), connection(8080, 1000, 2)];
        let mut script = script([scene(&rows, &[70])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        for look in 0..10 {
            observer.look(S * look);
        }
        assert_eq!(observer.kernel.fd_tables_read, 1);
    }

    #[test]
    fn a_proxys_socket_that_closed_between_rows_and_fds_is_no_holder() {
        let short = connection(40000, 1337, 71);
        let mut script = script([scene(&[short], &[]), scene(&[], &[])]);
        assert_eq!(Observer::new(&mut script, rules(), None).look(S).sight(), Sight::Clear);
    }

    #[test]
    fn one_short_connection_after_another_holds_whatever_its_uid() {
        for uid in [1000, 1337] {
            let mut script = script((1..100).map(|inode| scene(&[connection(40000, uid, inode)], &[])));
            let mut observer = Observer::new(&mut script, rules(), None);
            for look in 0..20 {
                assert_eq!(observer.look_at_all(S * look).sight(), Sight::Held, "uid {uid}, look {look}");
            }
        }
    }

    #[test]
    fn a_reused_inode_is_looked_up_anew() {
        let (proxys, applications) = (connection(15006, 1337, 5), connection(8080, 1000, 5));
        // The fd tables are those of the scene after the rows'.
        let scenes = [scene(&[proxys], &[]), scene(&[applications], &[5]), scene(&[applications], &[])];
        let mut script = script(scenes);
        let mut observer = Observer::new(&mut script, rules(), None);
        assert_eq!(holds(observer.look(S)), []);
        assert_eq!(holds(observer.look(S * 2)), [(5, Holds::Connection)]);
    }

    #[test]
    fn undelivered_bytes_hold_until_they_are_delivered_or_stalled() {
        let owed = |send_queue| Row { send_queue, ..connection(15006, 1337, 70) };
        let orphan =
            Row { inode: 0, uid: 0, send_queue: 9, state: State::FinWait1, ..connection(8080, 0, 0) };
        let mut script = script([
            scene(&[owed(500)], &[70]),
            scene(&[owed(400), orphan], &[70]),
            scene(&[owed(400), orphan], &[70]),
            scene(&[owed(400)], &[70]),
            scene(&[owed(300)], &[70]),
            scene(&[owed(0)], &[70]),
        ]);
        let mut observer = Observer::new(&mut script, rules(), None);
        let mut look = |second: u32| holds(observer.look(S * second)).len();
        assert_eq!([look(0), look(3), look(7), look(8), look(9), look(10)], [1, 2, 2, 0, 1, 0]);
    }

    #[test]
    fn what_cannot_be_read_is_unknown_even_where_nothing_else_holds() {
        let broken = Scene { broken: true, ..scene(&[listener(15006, 1337, 70)], &[70]) };
        let mut script = script([broken, scene(&[], &[])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        let view = observer.look(S);
        assert_eq!(view.sight(), Sight::Unknown);
        assert!(view.trouble.as_ref().unwrap().contains("row 17"));
        assert_eq!(observer.look(S * 2).sight(), Sight::Clear);
    }

    #[test]
    fn a_glance_sees_the_end_of_the_few_that_hold() {
        let (one, two) = (connection(8080, 1000, 1), connection(8081, 1000, 2));
        let owed = Row { send_queue: 9, ..connection(15006, 1337, 70) };
        let mut script = script([scene(&[one, two, owed], &[70])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        observer.look(S);
        observer.look(S);
        assert_eq!(observer.glance(), Some(false));
        for ended in [
            vec![two, owed],
            vec![Row { inode: 0, state: State::FinWait2, ..one }, two, owed],
            vec![Row { inode: 9, ..one }, two, owed],
            vec![one, two, Row { send_queue: 0, ..owed }],
        ] {
            observer.kernel.scenes[0].rows = ended;
            assert_eq!(observer.glance(), Some(true));
        }
        let many: Vec<Row> = (1..10).map(|inode: u16| connection(8000 + inode, 1000, inode.into())).collect();
        observer.kernel.scenes[0].rows = many;
        observer.look(S * 2);
        assert_eq!(observer.glance(), Some(false));
        observer.kernel.scenes[0].rows.drain(1..);
        assert_eq!(observer.glance(), Some(false), "of many one is enough");
        observer.kernel.scenes[0].rows.clear();
        assert_eq!(observer.glance(), Some(true));
    }

    #[test]
    fn a_holder_that_is_still_there_decides_alone() {
        let many: Vec<Row> = (2..1_000)
            .rev()
            .map(|inode| connection(8000 + u16::try_from(inode).unwrap(), 1000, inode))
            .collect();
        let mut script = script([scene(&many, &[])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        observer.look(S);
        let before = observer.kernel.rows_read;
        // The oldest is left, though the table names it last.
        observer.kernel.scenes[0].rows.drain(..many.len() - 1);
        assert_eq!(observer.look(S * 2).sight(), Sight::Held);
        assert_eq!((observer.kernel.rows_read, observer.holder()), (before, many.last().copied()));
        observer.look(S * 11);
        assert_eq!(observer.kernel.rows_read - before, 1, "every ten seconds all is looked at");
        assert_eq!(observer.view().holders().count(), 1);
        observer.kernel.scenes[0].rows[0].inode = 2_000;
        assert_eq!(observer.look(S * 11).sight(), Sight::Held, "another one, that all rows show");
        observer.kernel.scenes[0].rows.clear();
        assert_eq!((observer.look(S * 11).sight(), observer.holder()), (Sight::Clear, None));
    }

    #[test]
    fn no_holder_hides_that_the_proxy_is_gone() {
        let rows = [listener(8080, 1000, 1)];
        let gone = Scene { envoy_gone: true, ..scene(&rows, &[]) };
        let mut script = script([scene(&rows, &[])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        assert_eq!(observer.look(S).proxy(), Proxy::Alive);
        observer.kernel.scenes[0] = gone;
        assert_eq!(observer.look(S).proxy(), Proxy::Gone);
    }

    #[test]
    fn an_unreadable_proxy_is_known_by_its_uid() {
        let rows = [listener(15006, 1337, 70), connection(8080, 1000, 2), connection(40000, 1337, 71)];
        let hidden = Scene { unreadable_as: Some(1337), ..scene(&rows, &[]) };
        let mut script = script([hidden]);
        let mut observer = Observer::new(&mut script, rules(), None);
        for look in 0..3 {
            assert_eq!(holds(observer.look(S * look)), [(2, Holds::Connection)]);
        }
        assert_eq!(observer.unreadable().len(), 1);
    }

    #[test]
    fn beside_an_unreadable_proxy_of_root_only_listeners_hold() {
        let rows = [listener(15006, 0, 70), listener(8080, 0, 1), connection(8080, 1000, 2)];
        let hidden = |rows: &[Row]| Scene { unreadable_as: Some(0), ..scene(rows, &[]) };
        let mut script = script([hidden(&rows), hidden(&rows), hidden(&rows), hidden(&rows[2..])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        assert_eq!(holds(observer.look_at_all(S)), [(1, Holds::Listener)]);
        assert_eq!(holds(observer.look_at_all(S * 2)), [(1, Holds::Listener)]);
        assert_eq!(holds(observer.look_at_all(S * 3)), []);
    }

    #[test]
    fn the_wrapped_command_is_a_proxy_whatever_its_name() {
        let mut script = script([scene(&[listener(15006, 1337, 70)], &[70])]);
        let rules = Rules { proxy: vec!["linkerd2-proxy".into()], ..rules() };
        let mut observer = Observer::new(&mut script, rules.clone(), None);
        assert_eq!((observer.look(S).sight(), observer.view().proxy()), (Sight::Held, Proxy::Gone));
        let mut script = super::tests::script([scene(&[listener(15006, 1337, 70)], &[70])]);
        let mut observer = Observer::new(&mut script, rules, Some(7));
        assert_eq!((observer.look(S).sight(), observer.view().proxy()), (Sight::Clear, Proxy::Alive));
    }

    #[test]
    fn owners_are_asked_again_when_a_proxy_comes() {
        let late = Scene { envoy_gone: true, ..scene(&[listener(15006, 1337, 70)], &[]) };
        let mut script = script([late.clone(), late, scene(&[listener(15006, 1337, 70)], &[70])]);
        let mut observer = Observer::new(&mut script, rules(), None);
        assert_eq!(observer.look(S).sight(), Sight::Held);
        assert_eq!(observer.look(S * 2).sight(), Sight::Clear);
    }

    #[test]
    fn control_groups_tell_proxies_apart_only_where_they_leave_one() {
        let visible = |pid, name: &str| Visible { pid, parent: 0, name: name.into() };
        let processes = [visible(2, "pilot-agent"), visible(3, "envoy"), visible(9, "envoy")];
        let pids = |groups: &[(i32, &'static str)], child| -> Vec<i32> {
            let mut kernel = &mut Script { groups: groups.iter().copied().collect(), ..Script::default() };
            let proxies = proxies_among(&mut kernel, &processes, &rules(), child);
            proxies.iter().map(|proxy| proxy.pid).collect()
        };
        let container = [(2, "/a"), (3, "/a"), (9, "/b")];
        let with_own = |own| [&container[..], &[(own_pid(), own)]].concat();
        assert_eq!(pids(&with_own("/a"), Some(2)), [2, 3]);
        assert_eq!(pids(&with_own("/a"), None), [2, 3]);
        // outlast in a group of its own: not even the child's tells anything.
        assert_eq!(pids(&with_own("/own"), None), [2, 3, 9]);
        assert_eq!(pids(&with_own("/own"), Some(2)), [2, 3, 9]);
        // The child alone in another group is a proxy all the same.
        assert_eq!(pids(&[(2, "/c"), (3, "/a"), (9, "/b"), (own_pid(), "/a")], Some(2)), [2, 3]);
    }

    proptest! {
        /// Whatever comes and goes, exactly the application's sockets hold.
        #[test]
        fn no_socket_of_the_applications_is_overlooked(
            scenes in proptest::collection::vec(
                proptest::collection::btree_map(1u64..12, (any::<bool>(), any::<bool>()), 0..8), 1..12,
            ),
        ) {
            // Even inodes are the application's.
            let rows = |sockets: &std::collections::BTreeMap<u64, (bool, bool)>| {
                let mut rows: Vec<Row> = sockets.iter().map(|(inode, (listens, _))| {
                    let port = 8000 + u16::try_from(*inode).unwrap();
                    if *listens { listener(port, 1000, *inode) } else { connection(port, 1000, *inode) }
                }).collect();
                rows.sort_by_key(|row| !row.listens());
                rows
            };
            let envoy: Vec<u64> = (1..12).step_by(2).collect();
            let mut script = Script::default();
            script.scenes.push_back(Scene::default());
            let mut observer = Observer::new(&mut script, rules(), None);
            for (index, sockets) in scenes.iter().enumerate() {
                let rows = rows(sockets);
                observer.kernel.scenes[0] = scene(&rows, &envoy);
                let view = observer.look(S * u32::try_from(index).unwrap());
                prop_assert!(view.holders().all(|(holder, _)| holder.row.inode % 2 == 0));
                let sight = view.sight();
                prop_assert_eq!(sight == Sight::Clear, !rows.iter().any(|row| row.inode % 2 == 0));
                prop_assert_eq!(observer.sight(), sight);
            }
        }
    }
}
