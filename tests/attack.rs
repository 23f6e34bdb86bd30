//! An application's container that means harm. It shares the Pod's network with outlast, and by default nothing else:
//! it opens and closes sockets as it likes, takes any name and any free port, and answers where outlast asks. At worst
//! it makes its own hold last until the timeout; what else it gets is in `docs/reliability.md`.
//!
//! The attacker is threads of the test in the container's network, or processes there. Needs root, util-linux, iproute2
//! and the static binary: `scripts/test` has them.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::mem::replace;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, sendto, socket,
};
use pod::sockets::{connections, listen_reuseport};
use pod::{AS_PROXY, Group, Programs, Space, await_that, outlast, program};

/// Beside 100,000 sockets: MB of memory.
const MOST_BESIDE_SOCKETS: u64 = 64;
/// Without them, whatever is answered: MB of memory.
const MOST: u64 = 8;
/// Of the time that a hold takes, generously.
const HALF_A_CORE: f64 = 0.5;
/// Seconds of CPU time: five tries to tell Envoy to drain, one to tell pilot-agent, half a second each.
const REQUESTS: f64 = 4.0;

// --- The Pod ---

/// The programs of a test, and where they are.
struct Kit {
    programs: Programs,
    outlast: String,
    /// Programs that hold sockets, under the proxy's names.
    envoy: String,
    agent: String,
    /// The same under another name.
    server: String,
}

impl Kit {
    fn new() -> Kit {
        let programs = Programs::default();
        let outlast = programs.copy(outlast(), "outlast");
        let [envoy, agent, server] =
            ["envoy", "pilot-agent", "server"].map(|name| programs.copy(program("sockets"), name));
        Kit { programs, outlast, envoy, agent, server }
    }

    /// `outlast run` as Istio's proxy runs, around an Envoy that is ready.
    fn run(&self, flags: &[&str], envoy: &[&str]) -> Space {
        let run = [self.outlast.as_str(), "run"];
        Space::start(&[AS_PROXY, &run, flags, &["--", &self.envoy], envoy].concat())
    }

    fn prestop(&self, flags: &[&str]) -> Vec<String> {
        [&[self.outlast.as_str(), "prestop"], flags].concat().into_iter().map(str::to_owned).collect()
    }
}

fn start(space: &Space, argv: &[String]) -> Child {
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    space.command(&argv).stderr(Stdio::piped()).spawn().unwrap()
}

/// Its status and its log.
fn finish(child: Child) -> (i32, String) {
    let output = child.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let status = output.status.code().unwrap_or_else(|| panic!("{}: {log}", output.status));
    assert_lines(&log);
    (status, log)
}

/// Every line is outlast's own: nobody else's words begin one. A fixture's program says only that it is ready.
fn assert_lines(log: &str) {
    for line in log.lines().filter(|line| *line != "ready") {
        let mut words = line.splitn(3, ' ');
        let (time, level) = (words.next().unwrap(), words.next().unwrap_or_default());
        assert!(time.parse::<jiff::Timestamp>().is_ok(), "{line:?}");
        assert!(["ERROR", "WARN", "INFO"].contains(&level), "{line:?}");
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
    assert!(log.matches("hold released").count() <= 1, "{log}");
}

/// Seconds that a hold took.
fn held(log: &str) -> f64 {
    let after = log.split_once("hold released reason=").unwrap().1.split_once(" after=").unwrap().1;
    after.split_once('s').unwrap().0.parse().unwrap()
}

/// The most that a process has used.
#[derive(Debug, Default)]
struct Used {
    peak_kb: u64,
    /// Seconds.
    cpu: f64,
    wall: f64,
}

/// Measures a process, from outside, until its end.
fn measure(pid: i32) -> Used {
    let cpu = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // utime and stime, in ticks of 10 ms (proc_pid_stat(5)); the name may hold anything.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
        let mut ticks = || fields.next()?.parse::<u32>().ok();
        Some(f64::from(ticks()? + ticks()?) / 100.0)
    };
    // A zombie has none.
    let peak = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().trim_end_matches(" kB").parse().ok()
    };
    let (before, start) = (cpu().unwrap(), Instant::now());
    let mut used = Used::default();
    await_that("its end", || {
        let (Some(cpu), Some(peak_kb)) = (cpu(), peak()) else { return true };
        used = Used { peak_kb, cpu: cpu - before, wall: start.elapsed().as_secs_f64() };
        false
    });
    used
}

/// Stops the container, and measures outlast until that is over.
fn stop_and_measure(space: &mut Space) -> Used {
    space.signal("outlast", Signal::SIGTERM);
    let used = measure(space.init);
    assert_eq!(space.wait(), 143);
    assert_lines(&space.log());
    used
}

impl Used {
    /// At most so many MB, and seconds of CPU time.
    fn assert_within(&self, what: &str, mb: u64, cpu: f64) {
        println!("{what}: peak {} KB, CPU {:.2} s of {:.2} s", self.peak_kb, self.cpu, self.wall);
        assert!(self.peak_kb > 0 && self.peak_kb <= mb * 1024, "{what}: {self:?}");
        assert!(self.cpu <= cpu, "{what}: {self:?}");
    }
}

// --- The attacker ---

/// Threads in the container's network that do something again and again until this is dropped.
struct Attack {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Attack {
    fn new(space: &Space, steps: Vec<Box<dyn FnMut() + Send>>) -> Attack {
        let (stop, rounds) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let mut threads = Vec::new();
        for mut step in steps {
            let (stop, rounds) = (Arc::clone(&stop), Arc::clone(&rounds));
            threads.push(space.inside(|| {
                thread::spawn(move || {
                    while !stop.load(Relaxed) {
                        step();
                        rounds.fetch_add(1, Relaxed);
                    }
                })
            }));
        }
        Attack { stop, rounds, threads }
    }

    fn rounds(&self) -> usize {
        self.rounds.load(Relaxed)
    }

    fn await_rounds(&self, more: usize) {
        let enough = self.rounds() + more;
        await_that("the attack", || self.rounds() >= enough);
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

// --- Sockets ---

#[test]
fn beside_a_hundred_thousand_sockets_memory_and_cpu_are_bounded_and_the_timeout_is_kept() {
    let kit = Kit::new();
    let space = Space::start(&[&[kit.envoy.as_str()], &["--listen=127.0.0.1:15006"][..]].concat());
    for _ in 0..10 {
        // So many processes, because each may have so many files.
        space.spawn(&[&kit.server, "--connections=5000"]);
    }
    for source in ["--source=diag", "--source=proc"] {
        let hook = start(&space, &kit.prestop(&[source, "--timeout=5s"]));
        await_that("the hook", || !space.called("outlast").is_empty());
        let used = measure(space.called("outlast")[0]);
        let (status, log) = finish(hook);
        assert_eq!(status, 124, "{log}");
        assert!(log.contains("reason=timeout") && log.contains("holders=100000"), "{log}");
        used.assert_within(source, MOST_BESIDE_SOCKETS, HALF_A_CORE * used.wall);
    }
}

/// Each connection is new to outlast, and asks for a look of its own through all of the proxy's.
#[test]
fn one_short_connection_after_another_beside_a_busy_proxy_costs_bounded_cpu() {
    let kit = Kit::new();
    let mut space = kit.run(&["--timeout=8s"], &["--connections=1000"]);
    let mut held = space.inside(|| connections(2).unwrap());
    let attack = Attack::new(
        &space,
        vec![Box::new(move || {
            held.remove(0);
            held.extend(connections(1).unwrap());
            thread::sleep(Duration::from_millis(1));
        })],
    );
    let used = stop_and_measure(&mut space);
    assert!(space.log().contains("reason=timeout") && attack.rounds() > 1_000, "{}", space.log());
    used.assert_within("short connections", MOST_BESIDE_SOCKETS, HALF_A_CORE / 2.0 * used.wall);
}

/// The attacker's listeners are before the quiet one in one of the kernel's lists: its hash of at most 2^16 buckets takes
/// the port as it is (`ipv4_portaddr_hash`). What ends while a list is read shifts the rest of it, so that a look can miss
/// the quiet one; but then it has seen some of the others.
#[test]
fn sockets_that_come_and_go_do_not_end_the_hold_of_another_application() {
    const QUIET: u16 = 8080;
    let kit = Kit::new();
    let space = Space::start(&[&kit.envoy]);
    let at = |port: u16| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let quiet = space.inside(|| TcpListener::bind(at(QUIET)).unwrap());
    let hooks: Vec<Child> =
        [&["--source=diag"][..], &["--source=proc"], &["--settle=0s"], &["--settle=50ms", "--poll=50ms"]]
            .map(|flags| {
                start(&space, &kit.prestop(&[flags, &["--timeout=10m", "--grace-period=11m"]].concat()))
            })
            .into();
    await_that("all hooks", || space.log().matches("hold started").count() == hooks.len());
    let flap = move || {
        let listeners: Vec<_> = (0..2_000).map(|_| listen_reuseport(at(QUIET ^ 0x4000)).unwrap()).collect();
        drop((listeners, connections(50).unwrap()));
        // A look may also find nothing of the attacker's.
        thread::sleep(Duration::from_millis(20));
    };
    let attack = Attack::new(&space, vec![Box::new(flap)]);
    attack.await_rounds(30);
    // What holds is a connection now.
    let connection = space.inside(|| {
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, QUIET)).unwrap();
        (client, quiet.accept().unwrap())
    });
    drop(quiet);
    attack.await_rounds(30);
    drop(attack);
    // Longer than a settle time.
    thread::sleep(Duration::from_millis(600));
    assert!(!space.log().contains("hold released"), "{}", space.log());
    assert_eq!(space.called("outlast").len(), hooks.len());
    drop(connection);
    for hook in hooks {
        let (status, log) = finish(hook);
        assert_eq!(status, 0, "{log}");
        assert!(log.contains("reason=clear"), "{log}");
    }
}

#[test]
fn thousands_of_listeners_that_come_and_go_for_30_s_make_fewer_than_100_lines() {
    const AT_ONCE: usize = 50;
    let kit = Kit::new();
    // Nobody answers on 15000: that is said as well.
    let flags = ["--timeout=30s", "--grace-period=40s", "--drain=0s"];
    let mut space = kit.run(&flags, &["--listen=0.0.0.0:15006", "--connections=10"]);
    let _more_than_are_named = space.inside(|| connections(20).unwrap());
    let mut ports = (20_000..30_000).cycle();
    let mut bind = move || {
        // A process that another test is about to execute may have an old one for a moment.
        let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok();
        ports.by_ref().take(AT_ONCE).filter_map(bind).collect::<Vec<_>>()
    };
    let mut listeners = space.inside(&mut bind);
    let flap = move || {
        // Some are always there, and none of them for long.
        drop(replace(&mut listeners, bind()));
        thread::sleep(Duration::from_millis(1));
    };
    let attack = Attack::new(&space, vec![Box::new(flap)]);
    let used = stop_and_measure(&mut space);
    let (log, listeners) = (space.log(), attack.rounds() * AT_ONCE);
    let lines = log.lines().count();
    println!("{listeners} listeners, {lines} lines, {} bytes", log.len());
    assert!(listeners > 10_000, "only {listeners}");
    assert!(log.contains("reason=timeout") && lines < 100, "{lines} lines: {log}");
    assert!(log.lines().all(|line| line.len() < 4096));
    used.assert_within("listeners", MOST, HALF_A_CORE * used.wall);
}

// --- Names and ports ---

/// Dropping it ends its processes.
struct Elsewhere {
    unshare: Child,
    /// It goes on writing there.
    _stderr: BufReader<ChildStderr>,
}

impl Elsewhere {
    /// A process in the container's network and in a PID namespace of its own.
    fn start(space: &Space, argv: &[&str]) -> Elsewhere {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &space.init.to_string(), "--"]);
        command.args(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]).args(argv);
        let mut unshare = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(unshare.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "{argv:?}");
        Elsewhere { unshare, _stderr: stderr }
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// The proxy's names and ports in another container: an application like any other.
#[test]
fn an_envoy_in_another_pid_namespace_holds_and_is_no_proxy() {
    let kit = Kit::new();
    let space = Space::start(&[&kit.server, "--", &kit.envoy]);
    await_that("the proxy", || !space.called("envoy").is_empty());
    let taken = [
        "--listen=127.0.0.1:15000",
        "--listen=0.0.0.0:15006",
        "--listen=[::]:15020",
        "--listen=0.0.0.0:15021",
    ];
    let agent = [&[kit.agent.as_str()], &taken[..], &["--", &kit.envoy]].concat();
    let other = Elsewhere::start(&space, &agent);
    let hook = start(&space, &kit.prestop(&["--timeout=10m", "--grace-period=11m"]));
    space.await_log("listener tcp6 [::]:15020");
    drop(other);
    let (status, log) = finish(hook);
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("reason=clear") && log.contains("proxy=\"envoy "), "{log}");
    for port in ["127.0.0.1:15000", "0.0.0.0:15006", "[::]:15020", "0.0.0.0:15021"] {
        let listener = format!("{port} uid 0");
        let mut lines = log.lines().filter(|line| line.contains(&listener));
        assert!(lines.any(|line| line.contains("owner=application rule=other")), "{port}: {log}");
    }
    // And where the proxy ends, the attacker's is none to hold for.
    let _other = Elsewhere::start(&space, &agent);
    let hook = start(&space, &kit.prestop(&["--timeout=10m", "--grace-period=11m"]));
    await_that("the second hold", || space.log().matches("listener tcp6 [::]:15020").count() == 2);
    space.signal("envoy", Signal::SIGKILL);
    let (status, log) = finish(hook);
    assert!(status == 0 && log.contains("reason=proxy-gone"), "{log}");
}

/// Under `shareProcessNamespace`, where the attacker's processes are seen.
#[test]
fn names_in_a_shared_pid_namespace_forge_no_line_and_no_outlast_run() {
    let kit = Kit::new();
    let (sidecar, attacker) = (Group::new("names-sidecar"), Group::new("names-attacker"));
    let pause = kit.programs.copy(program("sockets"), "pause");
    let space = Space::start(&[&pause]);
    space.spawn(&sidecar.command(&[&kit.envoy]));
    let odd =
        ["envoy\nERROR x", "a) Z 1 (b", "\u{1b}[2J\r", "envoy\" x=\"y", "pilot-agent\\n", " ", "\u{fffd}é"];
    for name in odd {
        space.spawn(&attacker.command(&[&kit.programs.copy(program("sockets"), name)]));
    }
    // An envoy below an `outlast run`: a hook beside a real one would step back.
    kit.programs.copy(program("sockets"), "run");
    let path = format!("PATH={}:/usr/bin:/bin", kit.programs.path().display());
    // `outlast` here is the fixture's program, which starts `run`, which starts envoy.
    let fake = Programs::default();
    let fake = fake.copy(program("sockets"), "outlast");
    space.spawn(&attacker.command(&["env", &path, &fake, "run", &kit.envoy, "--listen=0.0.0.0:8080"]));
    await_that("the attacker's envoy", || space.called("envoy").len() == 2);
    for format in ["text", "json"] {
        let flags = ["--timeout=1s", &format!("--log-format={format}")];
        let argv = sidecar.command(&[&kit.outlast, "prestop", flags[0], flags[1]]).join("\u{1f}");
        let argv: Vec<_> = argv.split('\u{1f}').map(str::to_owned).collect();
        let output = start(&space, &argv).wait_with_output().unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(124), "{log}");
        if format == "text" {
            assert_lines(&log);
            assert!(log.contains("reason=timeout") && log.contains("0.0.0.0:8080"), "{log}");
        } else {
            let parsed = log.lines().map(serde_json::from_str::<serde_json::Value>);
            let messages: Vec<_> = parsed.map(|line| line.unwrap()["message"].to_string()).collect();
            assert!(messages.iter().any(|message| message.contains("0.0.0.0:8080")), "{log}");
        }
    }
}

// --- Answers ---

/// What an answer goes on with.
#[derive(Clone, Copy)]
enum Then {
    Close,
    Nothing,
    /// This for ever, with a pause between.
    Again(&'static str, Duration),
}

const AT_ONCE: Duration = Duration::ZERO;
const ANSWERS: [(&str, Then); 12] = [
    ("", Then::Close),
    ("", Then::Nothing),
    ("\0\u{1b}[2J 200 \r\n2026-01-01T00:00:00.000Z ERROR forged\n\r\n", Then::Close),
    ("HTTP/1.1 503 x\n2026-01-01T00:00:00.000Z ERROR forged\r\n\r\n", Then::Close),
    ("HTTP/1.1 200 OK\r\n", Then::Again("name: value\r\n", AT_ONCE)),
    ("HTTP/1.1 200 OK\r\nname: ", Then::Again("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", AT_ONCE)),
    ("HTTP/1.1 503 No\r\n\r\n", Then::Again("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", AT_ONCE)),
    ("", Then::Again("HTTP/1.1 100 Continue\r\n\r\n", AT_ONCE)),
    ("HTTP/1.1 200 OK\r\nname: ", Then::Again("x", Duration::from_secs(1))),
    ("HTTP/1.1 307 x\r\nlocation: http://203.0.113.7/\r\ncontent-length: 0\r\n\r\n", Then::Close),
    ("HTTP/1.1 308 x\r\nlocation: http://[2001:db8::7]/\r\ncontent-length: 0\r\n\r\n", Then::Close),
    ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", Then::Close),
];

fn answer(mut stream: TcpStream, (first, then): (&str, Then)) {
    let _ = stream.read(&mut [0; 4096]);
    let mut said = stream.write_all(first.as_bytes());
    match then {
        Then::Close => {}
        // Until the other side has had enough.
        Then::Nothing => while stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {},
        Then::Again(more, pause) => {
            let more = if pause.is_zero() { more.repeat(1_000) } else { more.to_owned() };
            while said.is_ok() {
                said = stream.write_all(more.as_bytes());
                thread::sleep(pause);
            }
        }
    }
}

/// A container with two more addresses, and listeners there that nobody may come to, nor to the redirects' port on
/// loopback, to which every address would be turned. In the proxy's place the attacker
/// answers on every port that outlast asks.
struct Answered {
    space: Space,
    elsewhere: Vec<TcpListener>,
    asked: Arc<AtomicUsize>,
}

impl Answered {
    fn new(argv: &[&str], how: (&'static str, Then)) -> Answered {
        let addresses = "ip addr add 203.0.113.7/32 dev lo && ip addr add 2001:db8::7/128 dev lo nodad";
        let space = Space::start_with(addresses, argv);
        space.await_ready();
        let elsewhere = space.inside(|| {
            ["203.0.113.7:80", "[2001:db8::7]:80", "127.0.0.1:80", "[::1]:80"]
                .map(|at| TcpListener::bind(at).unwrap())
                .into()
        });
        let asked = Arc::<AtomicUsize>::default();
        for port in [15000, 15020, 15021] {
            for host in ["127.0.0.1", "[::1]"] {
                let listener = space.inside(|| TcpListener::bind(format!("{host}:{port}")).unwrap());
                let asked = Arc::clone(&asked);
                // It ends with the test's process.
                thread::spawn(move || {
                    for stream in listener.incoming() {
                        asked.fetch_add(1, Relaxed);
                        thread::spawn(move || answer(stream.unwrap(), how));
                    }
                });
            }
        }
        Answered { space, elsewhere, asked }
    }

    fn asked(&self) -> usize {
        self.asked.load(Relaxed)
    }

    fn assert_none_elsewhere(&self) {
        for listener in &self.elsewhere {
            listener.set_nonblocking(true).unwrap();
            let come = listener.accept().map(|(_, peer)| peer);
            assert!(come.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "{come:?}");
        }
    }
}

/// For every answer at once.
fn for_each_answer(test: impl Fn((&'static str, Then)) + Sync) {
    thread::scope(|scope| {
        for how in ANSWERS {
            let test = &test;
            scope.spawn(move || test(how));
        }
    });
}

#[test]
fn whatever_a_hook_is_answered_the_timeout_is_kept_and_no_other_address_is_asked() {
    let kit = Kit::new();
    for_each_answer(|how| {
        let pod = Answered::new(&[&kit.agent, "--", &kit.envoy], how);
        let hook = start(&pod.space, &kit.prestop(&["--drain=0s", "--timeout=3s"]));
        await_that("the hook", || !pod.space.called("outlast").is_empty());
        let used = measure(pod.space.called("outlast")[0]);
        let (status, log) = finish(hook);
        assert_eq!(status, 124, "{log}");
        assert!(log.contains("reason=timeout") && held(&log) < 15.0, "{log}");
        assert!(pod.asked() >= 1 && pod.asked() <= 10, "{} requests: {log}", pod.asked());
        used.assert_within(&format!("{:?}", how.0), MOST, REQUESTS);

        let (status, log) = finish(start(&pod.space, &kit.prestop(&["--native-sidecar"])));
        assert_eq!(status, 0, "{log}");
        let ready = how.0.ends_with("200 OK\r\ncontent-length: 0\r\n\r\n");
        let words = ["poststart", if ready { "--ready-timeout=50s" } else { "--ready-timeout=1s" }]
            .map(str::to_owned);
        let (status, log) =
            finish(start(&pod.space, &[std::slice::from_ref(&kit.outlast), &words[..]].concat()));
        assert_eq!(status, if ready { 0 } else { 124 }, "{log}");
        pod.assert_none_elsewhere();
    });
}

#[test]
fn whatever_run_is_answered_the_signal_is_forwarded_and_no_other_address_is_asked() {
    let kit = Kit::new();
    for_each_answer(|how| {
        // With its listeners ignored, so that the hold ends clear and pilot-agent's drain is to be skipped.
        let flags =
            ["--ignore-port=80,15000,15020,15021", "--drain=0s", "--timeout=50s", "--grace-period=60s"];
        let argv =
            [&[kit.outlast.as_str(), "run"], &flags[..], &["--", &kit.agent, "--", &kit.envoy]].concat();
        let mut pod = Answered::new(&argv, how);
        await_that("Envoy", || !pod.space.called("envoy").is_empty());
        let application = pod.space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
        pod.space.signal("outlast", Signal::SIGTERM);
        pod.space.await_log("listener tcp 0.0.0.0:8080");
        drop(application);
        let used = measure(pod.space.init);
        assert_eq!(pod.space.wait(), 143);
        let log = pod.space.log();
        assert_lines(&log);
        let told =
            log.contains("nothing is left to drain") || log.contains("cannot skip pilot-agent's own drain");
        assert!(log.contains("reason=clear") && told, "{log}");
        used.assert_within(&format!("{:?}", how.0), MOST, REQUESTS);
        pod.assert_none_elsewhere();
    });
}

// --- With more than an application gets by default ---

/// Whoever has `CAP_NET_ADMIN` in the Pod may send to outlast's own netlink socket.
#[test]
fn messages_on_netlink_that_are_not_the_kernels_neither_release_nor_prolong() {
    let kit = Kit::new();
    let mut space = kit.run(&["--timeout=3s"], &[]);
    let listener = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    let flood = || -> Box<dyn FnMut() + Send> {
        let mut own = None;
        Box::new(move || {
            let own = own.get_or_insert_with(|| {
                socket(
                    AddressFamily::Netlink,
                    SockType::Raw,
                    SockFlag::SOCK_CLOEXEC,
                    SockProtocol::NetlinkSockDiag,
                )
                .unwrap()
            });
            // Columns: address, protocol, port. outlast's port is its pid in its own namespace.
            let all = fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
            let ports = all.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
            for port in
                ports.filter(|row| row[1] == "4").map(|row| row[2].parse().unwrap()).filter(|port| *port == 1)
            {
                // Ends of dumps without a row: struct nlmsghdr with NLMSG_DONE, and the sequence that may be next.
                for sequence in 1..300_u32 {
                    let sequence = sequence.to_ne_bytes();
                    let done = [[20, 0, 0, 0], [3, 0, 0, 0], sequence, [0; 4], [0; 4]].concat();
                    match sendto(own.as_raw_fd(), &done, &NetlinkAddr::new(port, 0), MsgFlags::MSG_DONTWAIT) {
                        Ok(_) | Err(Errno::EAGAIN | Errno::ECONNREFUSED | Errno::ENOBUFS) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        })
    };
    space.signal("outlast", Signal::SIGTERM);
    space.await_log("listener tcp 0.0.0.0:8080");
    let attack = Attack::new(&space, vec![flood(), flood()]);
    measure(space.init);
    assert_eq!(space.wait(), 143);
    let log = space.log();
    assert_lines(&log);
    assert!(log.contains("reason=timeout") && held(&log) < 15.0 && attack.rounds() > 10, "{log}");
    assert!(!log.contains("listeners changed"), "{log}");
    drop(listener);
}
