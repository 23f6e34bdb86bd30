//! Hours of a Pod in seconds: signals, orphans, hooks and looks by the thousand leave outlast as it was. In memory it may
//! grow by no more than a few pages, however many there were.
//!
//! Each test takes `LONG_LIFE_SECONDS`, 10 where that is not set; with `--nocapture` they say what there was.
//! Needs root, util-linux, iproute2 and the static binary: `scripts/test` has them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pod::sockets::connections;
use pod::{Programs, Space, await_that, outlast, program};

/// KiB. The allocator keeps what one busy moment needed, which differs between moments; a byte for each of the signals of
/// the short form would be more.
const MOST_GROWTH: u64 = 16;
const SIGNALS: usize = 1_000;
const ORPHANS: usize = 200;
/// Of an application that closes its listener and opens it again.
const TURNS: usize = 20;

fn time() -> Duration {
    let seconds =
        std::env::var("LONG_LIFE_SECONDS").map_or(10, |text| text.parse().expect("LONG_LIFE_SECONDS"));
    Duration::from_secs(seconds)
}

/// What would grow.
#[derive(Debug, PartialEq, Eq)]
struct Counters {
    /// KiB that no file stands for.
    anonymous: u64,
    /// KiB that are resident, with pages of the program itself, which come as they are used first: to be read.
    rss: u64,
    fds: usize,
    threads: u64,
}

fn field(text: &str, name: &str) -> u64 {
    let line =
        text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {text}"));
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

fn counters(pid: i32) -> Counters {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    // status has memory rounded; this is exact.
    let memory = read("smaps_rollup");
    Counters {
        anonymous: field(&memory, "Anonymous"),
        rss: field(&memory, "Rss"),
        fds: fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(),
        threads: field(&read("status"), "Threads"),
    }
}

fn children(pid: i32) -> usize {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap().split_whitespace().count()
}

fn wake_ups(pid: i32) -> u64 {
    field(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap(), "voluntary_ctxt_switches")
}

/// Signals that COMMAND ignores, and orphans that end before and after their parent.
fn signals_and_orphans(space: &Space) {
    for number in 0..SIGNALS {
        let signal = [Signal::SIGWINCH, Signal::SIGURG, Signal::SIGCONT][number % 3];
        kill(Pid::from_raw(space.init), signal).unwrap();
    }
    let script = format!("i=0; while [ $i -lt {ORPHANS} ]; do (exit 3) & i=$((i + 1)); done");
    assert!(space.command(&["sh", "-c", &script]).status().unwrap().success());
}

/// Only COMMAND is left.
fn await_reaped(space: &Space) {
    await_that("every orphan is reaped", || children(space.init) == 1);
}

fn assert_as_before(before: &Counters, space: &Space) {
    let mut after = counters(space.init);
    // A signal may be under way.
    await_that("memory at rest", || {
        after = counters(space.init);
        after.fds == before.fds
    });
    println!("before {before:?}\nafter  {after:?}");
    assert_eq!((after.fds, after.threads), (before.fds, before.threads));
    assert!(after.anonymous <= before.anonymous + MOST_GROWTH, "{before:?} {after:?}");
}

/// Does it again and again, and compares what outlast uses after a tenth of the time and at the end; how often it did it.
fn live(space: &Space, mut round: impl FnMut()) -> usize {
    let start = Instant::now();
    let mut rounds = 0;
    let mut until = |end: Duration| {
        while start.elapsed() < end {
            round();
            rounds += 1;
        }
        await_reaped(space);
    };
    until(time() / 10);
    let before = counters(space.init);
    until(time());
    assert_as_before(&before, space);
    rounds
}

struct Kit {
    programs: Programs,
    outlast: String,
    envoy: String,
}

impl Kit {
    fn new() -> Kit {
        let programs = Programs::default();
        let (outlast, envoy) =
            (programs.copy(outlast(), "outlast"), programs.copy(program("sockets"), "envoy"));
        Kit { programs, outlast, envoy }
    }

    fn hook(&self, space: &Space, words: &[&str]) {
        let output = space.command(&[&[self.outlast.as_str()], words].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn under_run_signals_orphans_and_hooks_leave_it_as_it_was() {
    let kit = Kit::new();
    let mut space = Space::start(&[&kit.outlast, "run", "--", &kit.envoy, "--listen=0.0.0.0:15006"]);
    let rounds = live(&space, || {
        signals_and_orphans(&space);
        kit.hook(&space, &["prestop", "--log-level=error"]);
        kit.hook(&space, &["prestop", "--log-level=error", "--min-wait=1ms"]);
        kit.hook(&space, &["status", "--check"]);
    });
    println!(
        "run: {} signals, {} orphans, {} hooks, {rounds} looks of status",
        rounds * SIGNALS,
        rounds * ORPHANS,
        rounds * 2
    );
    space.signal("outlast", Signal::SIGTERM);
    assert_eq!(space.wait(), 143);
    assert!(space.log().contains("reason=clear"), "{}", space.log());
}

#[test]
fn under_app_signals_and_orphans_leave_it_as_it_was() {
    let kit = Kit::new();
    let worker = kit.programs.copy(program("sockets"), "worker");
    let flags = ["--ready-timeout=0s", "--on-timeout=continue"];
    let mut space = Space::start(&[&[kit.outlast.as_str(), "app"], &flags[..], &["--", &worker]].concat());
    let rounds = live(&space, || signals_and_orphans(&space));
    println!("app: {} signals, {} orphans", rounds * SIGNALS, rounds * ORPHANS);
    space.signal("outlast", Signal::SIGTERM);
    assert_eq!(space.wait(), 143);
}

/// One hold of very many looks, in which everything goes on: sockets come and go, orphans are reaped, signals passed on.
#[test]
fn in_a_hold_looks_by_the_thousand_leave_it_as_it_was() {
    let kit = Kit::new();
    let flags = ["--poll=1ms", "--timeout=24h", "--grace-period=25h"];
    let run = [kit.outlast.as_str(), "run"];
    let mut space = Space::start(&[&run, &flags[..], &["--", &kit.envoy, "--listen=0.0.0.0:15006"]].concat());
    let application = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    space.signal("outlast", Signal::SIGTERM);
    space.await_log("listener tcp 0.0.0.0:8080");
    let (start, wake_ups_before) = (Instant::now(), wake_ups(space.init));
    let mut application = Some(application);
    let rounds = live(&space, || {
        signals_and_orphans(&space);
        // Looks at listeners alone, at everything, and at one that is known.
        space.inside(|| {
            let wait = |more| {
                let enough = wake_ups(space.init) + more;
                await_that("looks", || wake_ups(space.init) >= enough);
            };
            for _ in 0..TURNS {
                let connections = connections(10).unwrap();
                drop(application.take());
                wait(2);
                // A process that another test is about to execute may have the old one for a moment.
                await_that("the port", || {
                    application = TcpListener::bind("0.0.0.0:8080").ok();
                    application.is_some()
                });
                wait(2);
                drop(connections);
            }
        });
    });
    let looks = wake_ups(space.init) - wake_ups_before;
    println!(
        "hold: {looks} wake-ups in {:.0} s, {} signals, {} orphans, {} sockets, {} lines",
        start.elapsed().as_secs_f64(),
        rounds * SIGNALS,
        rounds * ORPHANS,
        rounds * TURNS * 21,
        space.log().lines().count()
    );
    drop(application);
    assert_eq!(space.wait(), 143);
    assert!(space.log().contains("reason=clear"), "{}", space.log());
}

/// Whole holds, one after the other.
#[test]
fn hold_after_hold_ends_clear_and_leaves_no_process() {
    let kit = Kit::new();
    let space = Space::start(&[&kit.envoy, "--listen=0.0.0.0:15006", "--connections=50"]);
    let start = Instant::now();
    let mut holds = 0;
    while start.elapsed() < time() {
        let application = space.inside(|| connections(20).unwrap());
        let argv = [kit.outlast.as_str(), "prestop", "--settle=10ms", "--timeout=24h", "--grace-period=25h"];
        let mut hook = space.command(&argv).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(hook.stderr.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("holds=connection")));
        drop(application);
        let rest: Vec<_> = lines.map(Result::unwrap).collect();
        assert_eq!(hook.wait().unwrap().code(), Some(0), "{rest:?}");
        assert!(rest.iter().any(|line| line.contains("hold released reason=clear")), "{rest:?}");
        holds += 1;
    }
    assert!(space.called("outlast").is_empty());
    println!("prestop: {holds} holds");
}
