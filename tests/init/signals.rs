//! Every signal reaches COMMAND as promised, from the first moment to the last.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::process::{Launch, NEVER, Running, children, field, state, status, until, within};
use crate::sys::{self, libc};
use crate::table::{Init, row_in_turn, rows};

/// The kernel's last signal. Of all that are pending it is taken last: what comes after it will not come any more.
const LAST: i32 = 64;
/// A real-time signal whose default is to end the process; pending beside TERM, it is taken after it.
const LATER: i32 = 40;

/// The flag that makes it signal a group.
fn group(init: Init) -> Option<&'static str> {
    match init {
        Init::Tini | Init::TiniStatic | Init::Catatonit => Some("-g"),
        Init::DumbInit => None,
        Init::Outlast => Some("--signal-group"),
    }
}

/// The flag that makes it signal one process alone.
fn single(init: Init) -> Option<&'static str> {
    (init == Init::DumbInit).then_some("-c")
}

/// Sends every catchable signal; returns those that COMMAND does not get, and those that it gets besides.
fn passed_on(run: &mut Running) -> (Vec<i32>, Vec<(i32, i32)>) {
    let (mut lost, mut more) = (Vec::new(), Vec::new());
    for signal in sys::catchable() {
        run.signal(signal);
        if signal != LAST {
            run.signal(LAST);
        }
        let mut got = run.lines_until(&LAST.to_string());
        if signal == LAST {
            continue;
        }
        match got.iter().position(|line| *line == signal.to_string()) {
            Some(at) => drop(got.remove(at)),
            None => lost.push(signal),
        }
        more.extend(got.iter().map(|line| (signal, line.parse().unwrap())));
    }
    (lost, more)
}

fn words(lost: &[i32], more: &[(i32, i32)]) -> String {
    let mut text = if lost.is_empty() { "all".into() } else { format!("all but {}", sys::names(lost)) };
    for (signal, with) in more {
        text += &format!("; {} with {}", sys::name(*signal), sys::name(*with));
    }
    text
}

rows! {
    /// All of 1 to 64 but KILL and STOP, sent by another process.
    fn each_signal_as_pid_1(init) {
        let mut run = Launch::of(init).flag(single(init)).role("report", &[]).start().ready();
        let (lost, more) = passed_on(&mut run);
        words(&lost, &more)
    }

    fn each_signal_not_as_pid_1(init) {
        let mut run = Launch::of(init).flag(single(init)).not_pid_1().role("report", &[]).start().ready();
        let (lost, more) = passed_on(&mut run);
        words(&lost, &more)
    }

    /// Every signal that is blocked by the one who starts it.
    fn a_fully_blocked_mask_at_the_start(init) {
        let launch = Launch::of(init).flag(single(init)).role("report", &[]).with(|| {
            sys::set_mask(u64::MAX);
            Ok(())
        });
        let (lost, more) = passed_on(&mut launch.start().ready());
        words(&lost, &more)
    }

    /// Every signal that is ignored by the one who starts it, as nohup does with HUP.
    fn all_ignored_at_the_start(init) {
        let launch = Launch::of(init).flag(single(init)).role("report", &[]).with(|| {
            sys::catchable().filter(|n| *n != libc::SIGCHLD).for_each(sys::ignore);
            Ok(())
        });
        let (lost, more) = passed_on(&mut launch.start().ready());
        words(&lost, &more)
    }

    /// A signal that was sent before the init's first instruction, and is blocked then.
    fn one_pending_at_the_start(init) {
        let launch = Launch::of(init).flag(single(init)).role("report", &[]).with(|| {
            sys::set_mask(u64::MAX);
            // SAFETY: plain numbers.
            unsafe { libc::kill(libc::getpid(), libc::SIGUSR1) };
            Ok(())
        });
        let mut run = launch.start();
        run.lines_until("ready");
        run.signal(LAST);
        let got = run.lines_until(&LAST.to_string());
        if got == [libc::SIGUSR1.to_string()] { "passed on".into() } else { "lost".into() }
    }

    /// 10,000 real-time signals, which queue, 10,000 others, which do not, and one TERM among them.
    fn a_burst_of_10_000(init) {
        let launch = Launch::of(init).flag(single(init)).role("report", &[]);
        let run = launch.with(|| sys::set_limit(libc::RLIMIT_SIGPENDING, 100_000));
        let mut run = run.start().ready();
        for count in 0..10_000 {
            run.signal(LATER);
            run.signal(libc::SIGUSR1);
            if count == 5_000 {
                run.signal(libc::SIGTERM);
            }
        }
        run.signal(LAST);
        let got = run.lines_until(&LAST.to_string());
        let count = |signal: i32| got.iter().filter(|line| **line == signal.to_string()).count();
        let (queued, term, coalesced) = (count(LATER), count(libc::SIGTERM), count(libc::SIGUSR1));
        assert!((1..=10_000).contains(&coalesced));
        // Then it rests.
        until("it is idle", || run.is_idle());
        format!("{queued} and TERM {term}")
    }

    /// The child has ended, and the init does not know yet.
    fn a_signal_after_the_end(init) {
        let mut run = Launch::of(init).role("orphans", &["0", "0"]).with_stdin_pipe().start().ready();
        let child = run.child();
        run.signal(libc::SIGSTOP);
        until("the init stops", || state(run.pid) == 'T');
        run.close_stdin();
        until("COMMAND ends", || state(child) == 'Z');
        run.signal(libc::SIGTERM);
        run.signal(libc::SIGUSR1);
        run.signal(libc::SIGCONT);
        run.end()
    }

    /// Signals all the while that COMMAND ends: 50 times.
    fn signals_while_it_ends(init) {
        let ends = (0..50).map(|_| {
            let mut run = Launch::of(init).role("orphans", &["0", "0"]).with_stdin_pipe().start().ready();
            run.close_stdin();
            let pid = run.pid;
            until("it ends", || {
                // WINCH does nothing to who does not ask for it.
                sys::kill(pid, libc::SIGWINCH);
                state(pid) == 'Z'
            });
            run.end()
        });
        let mut ends: Vec<_> = ends.collect();
        ends.dedup();
        ends.join(", ")
    }

    /// A stopped process does not notice TERM.
    fn term_to_a_stopped_child(init) {
        let mut run = Launch::of(init).role("stop", &[]).start().ready();
        let child = run.child();
        until("COMMAND stops", || state(child) == 'T');
        run.signal(libc::SIGTERM);
        let stuck = || {
            let pending = field(&status(child), "ShdPnd").unwrap_or_default();
            let term = u64::from_str_radix(&pending, 16).unwrap_or(0) & 1 << (libc::SIGTERM - 1);
            term != 0 && state(child) == 'T' && run.is_idle()
        };
        // TERM is there, the init has nothing more to do, and so it stays.
        let mut since = Instant::now();
        let ended = within(NEVER, || {
            if !stuck() {
                since = Instant::now();
            }
            state(run.pid) == 'Z' || since.elapsed() > Duration::from_secs(1)
        });
        assert!(ended, "neither ended nor stopped");
        if state(run.pid) == 'Z' { format!("ends with {}", run.end()) } else { "stays stopped".into() }
    }

    /// A shell script and what it runs.
    fn with_the_group_option(init) {
        let mut run = Launch::of(init).flag(group(init)).role("pair", &[]).start().ready();
        run.signal(libc::SIGTERM);
        let mut got = run.rest();
        got.retain(|line| !line.ends_with(" 18"));
        got.sort();
        got.join(", ")
    }

    /// A shell pipeline ends with it, and its status is the last command's.
    fn a_shell_pipeline_with_the_group_option(init) {
        let script = "echo ready; sleep 1000 | sleep 1000";
        let mut run = Launch::of(init).flag(group(init)).command(["sh", "-c", script]).start().ready();
        let shell = run.child();
        until("the pipeline runs", || {
            children(shell).iter().filter(|pid| field(&status(**pid), "Name").as_deref() == Some("sleep")).count() == 2
        });
        run.signal(libc::SIGTERM);
        run.end()
    }

    fn without_the_group_option(init) {
        let mut run = Launch::of(init).flag(single(init)).role("pair", &[]).start().ready();
        run.signal(libc::SIGTERM);
        let mut got = run.rest();
        got.retain(|line| !line.ends_with(" 18"));
        got.join(", ")
    }

    /// The init may not signal COMMAND (which has become another user), and goes on.
    fn a_refused_kill(init) {
        let launch = Launch::of(init).role("report", &["40", "5"]);
        let mut run = launch.with(|| sys::refuse(&[libc::SYS_kill], libc::EPERM)).start().ready();
        let child = run.child();
        run.signal(libc::SIGUSR1);
        until("the signal is taken", || state(run.pid) == 'Z' || run.is_idle());
        if state(run.pid) != 'Z' {
            sys::kill(child, LATER);
        }
        let end = run.end();
        let said = run.stderr().contains("ermitted");
        format!("{}{}", if end == "5" { "goes on" } else { "ends" }, if said { ", and says so" } else { "" })
    }

    /// A neighbour in the same namespace gets nothing, neither of a signal nor of the end.
    fn neighbours_are_left_alone(init) {
        let mut neighbour = Launch::plain().not_pid_1().role("report", &[]).start().ready();
        let mut run = Launch::of(init).not_pid_1().role("report", &["15", "0"]).start().ready();
        run.signal(libc::SIGTERM);
        run.end();
        neighbour.signal(LAST);
        let got = neighbour.lines_until(&LAST.to_string());
        if got.is_empty() { "yes".into() } else { format!("no: {got:?}") }
    }
}

/// TERM as soon as the child can be seen, `tries` times: how often it is lost.
///
/// COMMAND dies of a later signal where TERM was lost. Nothing is waited for, so nothing is guessed.
fn lost_at_the_fork(init: Init, flag: Option<&str>, tries: usize) -> usize {
    let mut lost = 0;
    for _ in 0..tries {
        let mut run = Launch::of(init).flag(flag).role("ready", &[]).start();
        let child = format!("/proc/{}/root/proc/2", run.pid);
        let child = Path::new(&child);
        while !child.exists() {
            std::hint::spin_loop();
        }
        run.signal(libc::SIGTERM);
        // Ready, or dead before it could say so.
        run.line();
        run.signal(LATER);
        match run.end().as_str() {
            "143" => {}
            "168" => lost += 1,
            other => panic!("{init:?} ended with {other}"),
        }
    }
    lost
}

fn figure(init: Init, flag: Option<&str>) -> String {
    let lost = lost_at_the_fork(init, flag, 400);
    match (init, lost) {
        // Of the others it is a race: no figure is claimed.
        (Init::Outlast, _) | (_, 0) => format!("{lost} lost"),
        _ => format!("~{lost} lost"),
    }
}

/// 400 tries.
#[test]
fn term_at_the_moment_of_the_fork() {
    row_in_turn("signals::term_at_the_moment_of_the_fork", |init| figure(init, single(init)));
}

/// 400 tries.
#[test]
fn term_at_the_moment_of_the_fork_with_the_group_option() {
    row_in_turn("signals::term_at_the_moment_of_the_fork_with_the_group_option", |init| {
        figure(init, group(init))
    });
}

/// 1,000 times TERM at a moment within the first 20 ms: as PID 1, from the first instruction on.
#[test]
fn term_within_the_first_20_ms() {
    let mut tries = 0;
    while tries < 1_000 {
        // Spread evenly, in an order that has no pattern.
        let micros = tries * 7_919 % 20_000;
        let mut run = Launch::of(Init::Outlast).role("ready", &[]).start();
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(micros) {
            std::hint::spin_loop();
        }
        run.signal(libc::SIGTERM);
        run.line();
        run.signal(LATER);
        let end = run.end();
        assert_eq!(end, "143", "after {micros} µs");
        tries += 1;
    }
}

/// In a hold: what is not a stop signal goes on at once, a further TERM changes nothing, INT ends it.
#[test]
fn in_a_hold() {
    let hold = |flags: &[&str]| {
        let mut launch = Launch::of(Init::Outlast);
        for flag in flags {
            launch = launch.flag(Some(flag));
        }
        launch.role("report", &["15", "3"]).start().ready()
    };
    for end in [libc::SIGINT, libc::SIGQUIT] {
        let mut run = hold(&["--timeout=1000s", "--grace-period=1100s", "--min-wait=1000s"]);
        run.signal(libc::SIGTERM);
        until("the hold starts", || run.stderr().contains("hold started"));
        run.signal(libc::SIGUSR1);
        assert_eq!(run.line().as_deref(), Some("10"));
        run.signal(libc::SIGTERM);
        run.signal(LAST);
        assert_eq!(run.line().as_deref(), Some("64"));
        run.signal(end);
        assert_eq!(run.rest(), ["15"]);
        assert_eq!(run.end(), "3");
    }
    fs::metadata("/proc/self").unwrap();
}
