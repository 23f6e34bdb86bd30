//! Both sources show the same sockets: /proc/net/tcp and `sock_diag`, over random sockets in every state that can be
//! made without a second machine; and where netlink is refused, nothing changes but the source.
//!
//! Needs root, util-linux and iproute2: each test runs in a process with a network of its own.

use std::any::Any;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use std::{env, thread};

use nix::libc;
use outlast::pod::State::{
    CloseWait, Closing, Established, FinWait1, FinWait2, LastAck, Listen, SynRecv, SynSent, TimeWait,
};
use outlast::pod::kernel::{Kernel, Scope, Source, System};
use outlast::pod::{Row, State};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Nobody answers at 10.9.0.2: no end of the pair has that address. What a case leaves behind goes soon.
const NETWORK: &str = "ip link set lo up && ip link add hole type veth peer name other && ip link set other up && \
                       ip link set hole up && ip addr add 10.9.0.1/24 dev hole && \
                       ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:01 dev hole nud permanent && \
                       cd /proc/sys/net/ipv4 && echo 32 >tcp_max_tw_buckets && echo 1 >tcp_orphan_retries && \
                       echo 2 >tcp_fin_timeout && echo '4096 8192 16384' | tee tcp_rmem >tcp_wmem && exec \"$@\"";

/// Runs the test in a process with a network of its own, for /proc/net is that of a process's first thread. True there.
fn in_own_network(test: &str) -> bool {
    if env::var_os("OWN_NETWORK").is_some() {
        return true;
    }
    assert!(nix::unistd::geteuid().is_root(), "a network of one's own wants root: see scripts/test");
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", NETWORK, "sh"]).arg(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env("OWN_NETWORK", "1");
    // Its own account of one test is no part of this one's.
    let output = command.output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.success(), "{said}");
    false
}

#[derive(Clone, Copy, Debug)]
enum Family {
    V4,
    V6,
    /// A dual-stack listener with peers that speak v4.
    Mapped,
}

#[derive(Clone, Copy, Debug)]
enum End {
    /// Nobody connects.
    Listen {
        backlog: u8,
        copies: u8,
    },
    /// To nowhere.
    SynSent,
    /// The listener waits for data before it takes the connection for one.
    SynRecv,
    Unaccepted {
        bytes: u16,
    },
    Established {
        to_server: u16,
        to_client: u16,
    },
    /// More is sent than is taken.
    Stuck,
    /// The end of what is sent is behind what is not taken.
    FinWait1 {
        orphan: bool,
    },
    /// And the other has said its own end.
    Closing,
    /// One is in `FIN_WAIT2`, the other in `CLOSE_WAIT`.
    HalfClosed {
        orphan: bool,
        bytes: u16,
    },
    LastAck,
    TimeWait,
    /// A process holds a socket that is no connection any more.
    Reset,
}

#[derive(Clone, Copy, Debug)]
struct Recipe {
    family: Family,
    multipath: bool,
    uid: u16,
    end: End,
}

fn recipes() -> impl Strategy<Value = Vec<Recipe>> {
    let family = prop_oneof![Just(Family::V4), Just(Family::V6), Just(Family::Mapped)];
    let end = prop_oneof![
        (any::<u8>(), 1u8..4).prop_map(|(backlog, copies)| End::Listen { backlog, copies }),
        Just(End::SynSent),
        Just(End::SynRecv),
        any::<u16>().prop_map(|bytes| End::Unaccepted { bytes }),
        any::<[u16; 2]>().prop_map(|[to_server, to_client]| End::Established { to_server, to_client }),
        Just(End::Stuck),
        any::<bool>().prop_map(|orphan| End::FinWait1 { orphan }),
        Just(End::Closing),
        any::<(bool, u16)>().prop_map(|(orphan, bytes)| End::HalfClosed { orphan, bytes }),
        Just(End::LastAck),
        Just(End::TimeWait),
        Just(End::Reset),
    ];
    let recipe = (family, prop::bool::weighted(0.2), any::<u16>(), end)
        .prop_map(|(family, multipath, uid, end)| Recipe { family, multipath, uid, end });
    prop::collection::vec(recipe, 0..20)
}

/// What must stay open.
type Kept = Vec<Box<dyn Any>>;

impl Recipe {
    fn socket(self, domain: Domain) -> Socket {
        let multipath = self.multipath.then(|| Socket::new(domain, Type::STREAM, Some(Protocol::MPTCP)));
        // A kernel may be without it.
        multipath.and_then(Result::ok).unwrap_or_else(|| Socket::new(domain, Type::STREAM, None).unwrap())
    }

    fn listener(self, at: Option<&SockAddr>, backlog: i32) -> Socket {
        let (domain, any): (_, SocketAddr) = match self.family {
            Family::V4 => (Domain::IPV4, (Ipv4Addr::LOCALHOST, 0).into()),
            Family::V6 => (Domain::IPV6, (Ipv6Addr::LOCALHOST, 0).into()),
            Family::Mapped => (Domain::IPV6, (Ipv6Addr::UNSPECIFIED, 0).into()),
        };
        let socket = self.socket(domain);
        socket.set_reuse_port(true).unwrap();
        socket.bind(at.unwrap_or(&any.into())).unwrap();
        socket.listen(backlog).unwrap();
        socket
    }

    /// A socket on its way to the listener, or connected.
    fn client(self, listener: &Socket) -> Socket {
        let port = listener.local_addr().unwrap().as_socket().unwrap().port();
        let (domain, to): (_, SocketAddr) = match self.family {
            Family::V4 | Family::Mapped => (Domain::IPV4, (Ipv4Addr::LOCALHOST, port).into()),
            Family::V6 => (Domain::IPV6, (Ipv6Addr::LOCALHOST, port).into()),
        };
        let socket = self.socket(domain);
        socket.connect(&to.into()).unwrap();
        socket
    }

    fn make(self, kept: &mut Kept) {
        // SAFETY: a plain number: the uid that the kernel notes at new sockets.
        unsafe { libc::setfsuid(self.uid.into()) };
        let backlog = if let End::Listen { backlog, .. } = self.end { backlog.into() } else { 16 };
        let listener = self.listener(None, backlog);
        match self.end {
            End::Listen { copies, .. } => {
                let at = listener.local_addr().unwrap();
                for _ in 1..copies {
                    kept.push(Box::new(self.listener(Some(&at), backlog)));
                }
            }
            End::SynSent => {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                socket.set_nonblocking(true).unwrap();
                let nowhere: SocketAddr = "10.9.0.2:80".parse().unwrap();
                assert!(socket.connect(&nowhere.into()).is_err());
                kept.push(Box::new(socket));
            }
            End::SynRecv => {
                let seconds: libc::c_int = 60;
                // SAFETY: the option is read before the call returns, and its own size is passed.
                unsafe {
                    libc::setsockopt(
                        listener.as_raw_fd(),
                        libc::IPPROTO_TCP,
                        libc::TCP_DEFER_ACCEPT,
                        (&raw const seconds).cast(),
                        4,
                    );
                }
                kept.push(Box::new(self.client(&listener)));
            }
            End::Unaccepted { bytes } => {
                let client = self.client(&listener);
                send(&client, bytes.into());
                kept.push(Box::new(client));
            }
            _ => self.connection(&listener, kept),
        }
        kept.push(Box::new(listener));
        // SAFETY: as above.
        unsafe { libc::setfsuid(0) };
    }

    fn connection(self, listener: &Socket, kept: &mut Kept) {
        let client = self.client(listener);
        let (server, _) = listener.accept().unwrap();
        match self.end {
            End::Established { to_server, to_client } => {
                send(&client, to_server.into());
                send(&server, to_client.into());
            }
            End::Stuck => send(&client, usize::MAX),
            End::FinWait1 { orphan } => {
                send(&client, usize::MAX);
                client.shutdown(Shutdown::Write).unwrap();
                if orphan {
                    kept.push(Box::new(server));
                    return;
                }
            }
            End::Closing => {
                send(&client, usize::MAX);
                client.shutdown(Shutdown::Write).unwrap();
                server.shutdown(Shutdown::Write).unwrap();
            }
            End::HalfClosed { orphan, bytes } => {
                send(&client, bytes.into());
                client.shutdown(Shutdown::Write).unwrap();
                if orphan {
                    kept.push(Box::new(server));
                    return;
                }
            }
            End::LastAck => {
                client.shutdown(Shutdown::Write).unwrap();
                send(&server, usize::MAX);
                kept.push(Box::new(client));
                return;
            }
            End::TimeWait => return,
            End::Reset => {
                server.set_linger(Some(Duration::ZERO)).unwrap();
                kept.push(Box::new(client));
                return;
            }
            _ => unreachable!("no connection"),
        }
        kept.push(Box::new((client, server)));
    }
}

/// Sends so many bytes, or as many as are taken.
fn send(mut socket: &Socket, bytes: usize) {
    socket.set_nonblocking(true).unwrap();
    let piece = [0_u8; 4096];
    let mut left = bytes;
    while left > 0 {
        match socket.write(&piece[..left.min(piece.len())]) {
            Ok(sent) => left -= sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    socket.set_nonblocking(false).unwrap();
}

fn system(source: Source) -> System {
    let system = System::open(source);
    assert!(system.source().starts_with(if source == Source::Proc { "proc" } else { "diag" }));
    system
}

/// The rows in scope; a source may give more. Of each family the listeners come first.
fn rows(system: &mut System, scope: Scope) -> Vec<Row> {
    let mut rows = Vec::new();
    system.rows(scope, &mut |row| rows.push(row)).unwrap();
    let kinds: Vec<_> = rows.iter().map(|row: &Row| (row.local.is_ipv6(), !row.listens())).collect();
    assert!(kinds.is_sorted(), "{rows:#?}");
    rows.retain(|row| match scope {
        Scope::Listeners => row.listens(),
        Scope::ThatMatter => !matches!(row.state, State::TimeWait | State::SynRecv | State::NewSynRecv),
        Scope::All => true,
    });
    rows.sort_unstable();
    rows
}

/// What one source shows while the other shows the same before and after: no reading is of one instant.
fn shown_by_both(one: &mut System, other: &mut System, scope: Scope) -> Vec<Row> {
    for _ in 0..100 {
        let before = rows(one, scope);
        let between = rows(other, scope);
        if before == rows(one, scope) {
            assert_eq!(between.len(), before.len(), "{scope:?}: {between:#?}\n{before:#?}");
            for (theirs, ours) in between.iter().zip(&before) {
                assert_eq!(theirs, ours, "{scope:?}");
            }
            return before;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("the sockets never came to rest");
}

#[test]
fn both_sources_show_the_same_rows_whatever_the_sockets() {
    if !in_own_network("both_sources_show_the_same_rows_whatever_the_sockets") {
        return;
    }
    let seen = std::cell::RefCell::new(BTreeSet::new());
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    let check = |recipes: &[Recipe]| {
        let mut kept = Kept::new();
        for recipe in recipes {
            recipe.make(&mut kept);
        }
        let (mut diag, mut proc) = (system(Source::Diag), system(Source::Proc));
        for scope in [Scope::Listeners, Scope::ThatMatter, Scope::All] {
            let shown = shown_by_both(&mut diag, &mut proc, scope);
            seen.borrow_mut().extend(shown.iter().map(|row| row.state));
            // What is left of earlier connections ends at any time.
            for row in shown.iter().filter(|row| row.listens() || row.inode != 0).take(8) {
                is_found(&mut diag, &mut proc, row);
            }
        }
    };
    // One of each, for chance may leave one out.
    let each = [
        End::Listen { backlog: 1, copies: 2 },
        End::SynSent,
        End::SynRecv,
        End::Unaccepted { bytes: 1 },
        End::Established { to_server: 1, to_client: 1 },
        End::Stuck,
        End::FinWait1 { orphan: false },
        End::Closing,
        End::HalfClosed { orphan: false, bytes: 1 },
        End::HalfClosed { orphan: true, bytes: 0 },
        End::LastAck,
        End::TimeWait,
    ];
    check(&each.map(|end| Recipe { family: Family::V4, multipath: false, uid: 1000, end }));
    let result = TestRunner::new(config).run(&recipes(), |recipes| {
        check(&recipes);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let all =
        [Established, SynSent, SynRecv, FinWait1, FinWait2, TimeWait, CloseWait, LastAck, Listen, Closing];
    let seen = seen.into_inner();
    assert!(all.iter().all(|state| seen.contains(state)), "only {seen:?} were there");
}

/// A look for one socket agrees with the dump; the first of those asked for is there in both sources.
fn is_found(diag: &mut System, proc: &mut System, row: &Row) {
    assert!(proc.find(row).is_none(), "/proc cannot be asked for one socket");
    let Some(found) = diag.find(row).unwrap().unwrap() else {
        // One that an earlier case has closed, such as a part of an MPTCP connection.
        let still = rows(diag, Scope::All).into_iter().any(|now| now.is_socket_of(row));
        assert!(!still, "not found: {row}");
        return;
    };
    // Copies of a listener share their addresses, and the kernel picks one for a given peer.
    assert_eq!((found.local, found.remote), (row.local, row.remote));
    // Its state and its queues may have gone on.
    assert!(row.listens() || found.is_socket_of(row), "{found} is not {row}");
    let gone = Row { inode: u64::from(u32::MAX), ..*row };
    for system in [diag, proc] {
        assert!(system.first_there(&[gone]).unwrap().is_none());
        if row.inode == found.inode {
            // No reading of a table is of one instant: one that ends beside it can hide it, and it may have ended itself.
            let there = (0..10).any(|_| {
                system.first_there(&[gone, found]).unwrap().is_some_and(|there| there.inode == row.inode)
            });
            let ended = !there && !rows(system, Scope::All).iter().any(|now| now.is_socket_of(&found));
            assert!(there || ended, "not there: {found}");
        }
    }
}

#[test]
fn a_port_that_is_taken_again_is_another_socket() {
    if !in_own_network("a_port_that_is_taken_again_is_another_socket") {
        return;
    }
    let (mut diag, mut proc) = (system(Source::Diag), system(Source::Proc));
    let first = TcpListener::bind("127.0.0.1:8080").unwrap();
    let before = rows(&mut diag, Scope::Listeners)[0];
    drop(first);
    assert_eq!(diag.find(&before).unwrap().unwrap(), None);
    let _second = TcpListener::bind("127.0.0.1:8080").unwrap();
    let after = diag.find(&before).unwrap().unwrap().unwrap();
    assert_eq!((after.local, after.remote), (before.local, before.remote));
    assert_ne!(after.inode, before.inode);
    for system in [&mut diag, &mut proc] {
        assert_eq!(system.first_there(&[before]).unwrap(), None);
        assert_eq!(system.first_there(&[before, after]).unwrap(), Some(after));
    }
}

/// The filter of a profile that knows no netlink: `socket(AF_NETLINK, …)` fails with EPERM, everything else goes on.
/// Async-signal-safe.
fn refuse_netlink() -> io::Result<()> {
    const fn step(code: u32, k: u32, yes: u8, no: u8) -> libc::sock_filter {
        #[allow(clippy::cast_possible_truncation, reason = "the codes are 16 bits wide")]
        libc::sock_filter { code: code as u16, jt: yes, jf: no, k }
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small numbers")]
    let filter = [
        // struct seccomp_data: the number of the call, and at 16 the low half of its first argument.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_socket as u32, 0, 3),
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 16, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::AF_NETLINK as u32, 0, 1),
        step(libc::BPF_RET, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        step(libc::BPF_RET, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: 6, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the program and its steps outlive the calls.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn outlast(args: &[&str], refused: bool) -> (String, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/static/x86_64/outlast");
    assert!(path.exists(), "there is no static binary: scripts/test builds it, scripts/build-static alone");
    let mut command = Command::new(path);
    command.args(args);
    if refused {
        // SAFETY: the closure makes system calls only.
        unsafe { command.pre_exec(refuse_netlink) };
    }
    let output = command.output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn where_netlink_is_refused_the_tables_are_read_and_nothing_else_changes() {
    if !in_own_network("where_netlink_is_refused_the_tables_are_read_and_nothing_else_changes") {
        return;
    }
    let mut kept = Kept::new();
    for (family, end) in [
        (Family::V4, End::Listen { backlog: 5, copies: 2 }),
        (Family::V6, End::Established { to_server: 5, to_client: 0 }),
        (Family::Mapped, End::HalfClosed { orphan: false, bytes: 7 }),
    ] {
        Recipe { family, multipath: false, uid: 1000, end }.make(&mut kept);
    }
    let mut diag = system(Source::Diag);
    thread::spawn(move || {
        refuse_netlink().unwrap();
        let mut auto = System::open(Source::Auto);
        assert!(auto.source().starts_with("proc, for sock_diag says: "), "{}", auto.source());
        assert!(
            auto.source().contains("EPERM") || auto.source().contains("not permitted"),
            "{}",
            auto.source()
        );
        // The one that was opened before is of no use to the filter.
        assert!(shown_by_both(&mut diag, &mut auto, Scope::All).len() >= 8);
    })
    .join()
    .unwrap();

    let status = |refused| outlast(&["status", "--json", "--proxy=no-such-proxy"], refused).0;
    let came_to_rest = (0..100).find_map(|_| {
        let (before, between, after) = (status(false), status(true), status(false));
        (before == after).then_some((before, between))
    });
    let (without, with) = came_to_rest.unwrap();
    assert!(without.contains("\"sockets\""), "{without}");
    assert_eq!(without, with);
    let (_, warning) = outlast(&["status", "--source=diag"], true);
    assert!(warning.contains("the source that was asked for cannot be had"), "{warning}");
    let hold = ["prestop", "--timeout=300ms", "--proxy=no-such-proxy"];
    let said = |refused| outlast(&hold, refused).1;
    let (free, refused) = (said(false), said(true));
    assert!(free.contains(" source=diag"), "{free}");
    assert!(refused.contains(" source=\"proc, for sock_diag says: "), "{refused}");
    let end = |log: &str| log.lines().filter(|line| line.contains(" reason=")).count();
    assert_eq!((end(&free), end(&refused)), (1, 1), "{free}{refused}");
}
