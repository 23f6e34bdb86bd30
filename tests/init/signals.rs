//! Every signal reaches COMMAND as promised, from the first moment to the last.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::process::{Launch, Running, children, field, mask, state, status, until};
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
        Init::Dumb => None,
        Init::Outlast => Some("--signal-group"),
    }
}

/// The flag that makes it signal one process alone.
fn single(init: Init) -> Option<&'static str> {
    (init == Init::Dumb).then_some("-c")
}

/// Sends every catchable signal to an init that is started so; says which of them COMMAND does not get, and what else
/// it gets. An init that a signal ends is started again.
fn passed_on(launch: impl Fn() -> Launch) -> String {
    let start = || launch().role("report", &[]).start().ready();
    let mut run = start();
    let (mut dropped, mut deadly, mut stops, mut more) = (Vec::new(), Vec::new(), Vec::new(), String::new());
    for signal in sys::catchable().filter(|n| *n != LAST) {
        run.signal(signal);
        // For the one that dies of it or stops, time to do so.
        until("the signal is taken", || matches!(state(run.pid), 'Z' | 'T') || run.is_idle());
        let stopped = state(run.pid) == 'T';
        if stopped {
            stops.push(signal);
            run.signal(libc::SIGCONT);
        }
        if state(run.pid) == 'Z' {
            deadly.push(signal);
            sys::kill(run.orphan(), libc::SIGKILL);
            run = start();
            continue;
        }
        run.signal(LAST);
        let mut got = run.lines_until(&LAST.to_string());
        match got.iter().position(|line| *line == signal.to_string()) {
            Some(at) => drop(got.remove(at)),
            None => dropped.push(signal),
        }
        for with in got.into_iter().filter(|_| !stopped) {
            more.extend(["; ", &sys::name(signal), " with ", &sys::name(with.parse().unwrap())]);
        }
    }
    let words = |what: &str, signals: &[i32]| match signals {
        [] => String::new(),
        signals => format!("{what} {}", sys::names(signals)),
    };
    format!(
        "all{}{}{}{more}",
        words(" but", &dropped),
        words("; dies of", &deadly),
        words("; stops on", &stops)
    )
}

rows! {
    /// All of 1 to 64 but KILL and STOP, sent by another process.
    fn each_signal_as_pid_1(init) {
        passed_on(|| Launch::of(init).flag(single(init)))
    }

    fn each_signal_not_as_pid_1(init) {
        passed_on(|| Launch::of(init).flag(single(init)).not_pid_1())
    }

    /// Every signal that is blocked by the one who starts it.
    fn a_fully_blocked_mask_at_the_start(init) {
        passed_on(|| Launch::of(init).flag(single(init)).with(|| {
            sys::set_mask(u64::MAX);
            Ok(())
        }))
    }

    /// Every signal that is ignored by the one who starts it, as nohup does with HUP.
    fn all_ignored_at_the_start(init) {
        passed_on(|| Launch::of(init).flag(single(init)).with(|| {
            sys::catchable().filter(|n| *n != libc::SIGCHLD).for_each(sys::ignore);
            Ok(())
        }))
    }

    /// A signal that was sent before the init's first instruction, and is blocked then.
    fn one_pending_at_the_start(init) {
        let launch = Launch::of(init).flag(single(init)).role("report", &[]).with(|| {
            sys::set_mask(u64::MAX);
            sys::signal_from_a_child(libc::SIGUSR1)
        });
        let mut run = launch.start();
        run.lines_until("ready");
        run.signal(LAST);
        let got = run.lines_until(&LAST.to_string());
        if got == [libc::SIGUSR1.to_string()] { "passed on".into() } else { "lost".into() }
    }

    /// 10,000 real-time signals, which queue, 10,000 others, which do not, and one TERM among them.
    fn a_burst_of_10_000(init) {
        let mut run = Launch::of(init).flag(single(init)).role("report", &[]).start().ready();
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
        // Idle again, the init has done all that it does about TERM: so it comes first.
        let stuck = || run.is_idle() && state(child) == 'T' && has_pending(child, libc::SIGTERM);
        until("COMMAND ends or stays stopped", || state(run.pid) == 'Z' || stuck());
        if state(run.pid) == 'Z' { format!("ends with {}", run.end()) } else { "stays stopped".into() }
    }

    /// A shell script and what it runs.
    fn with_the_group_option(init) {
        who_gets_term(&Launch::of(init).flag(group(init)).role("pair", &[]).start().ready())
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
        who_gets_term(&Launch::of(init).flag(single(init)).role("pair", &[]).start().ready())
    }

    /// The init has no right to signal COMMAND, which has become another user.
    fn a_refused_kill(init) {
        let launch = Launch::of(init).role("user", &["40", "5"]).with_stdin_pipe();
        let mut run = launch.with(sys::drop_the_right_to_kill).start().ready();
        until("the init is idle", || run.is_idle());
        run.write_stdin();
        let mut run = run.ready();
        let child = run.child();
        run.signal(libc::SIGUSR1);
        until("the signal is taken", || state(run.pid) == 'Z' || run.is_idle());
        if state(run.pid) != 'Z' {
            sys::kill(child, LATER);
        }
        let end = run.end();
        let said = run.stderr().contains("ermitted");
        format!("{}{}", if end == "5" { "goes on" } else { "ends" }, if said { ", says so" } else { "" })
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

fn has_pending(pid: i32, signal: i32) -> bool {
    mask(&status(pid), "ShdPnd") & 1 << (signal - 1) != 0
}

/// All signals but KILL and STOP are blocked.
fn blocks_all(pid: i32) -> bool {
    mask(&status(pid), "SigBlk") == !(1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1))
}

/// Which of COMMAND and its child TERM reaches.
fn who_gets_term(run: &Running) -> String {
    let command = run.child();
    let child = children(command)[0];
    run.signal(libc::SIGTERM);
    until("TERM is taken", || run.is_idle());
    match (has_pending(command, libc::SIGTERM), has_pending(child, libc::SIGTERM)) {
        (true, true) => "COMMAND and its child".into(),
        (true, false) => "COMMAND".into(),
        other => format!("{other:?}"),
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

/// TERM at 1,000 moments within the first 20 ms, `start` being when the time begins.
fn ends_within_20_ms(launch: impl Fn() -> Launch, start: impl Fn(&Running), ends: &[&str]) {
    for count in 0..1_000 {
        // Evenly spread, in an order without a pattern.
        let moment = Duration::from_micros(count * 7_919 % 20_000);
        let mut run = launch().role("ready", &[]).start();
        start(&run);
        let begin = Instant::now();
        while begin.elapsed() < moment {
            std::hint::spin_loop();
        }
        run.signal(libc::SIGTERM);
        // Ready, or dead before it could say so.
        run.line();
        let mut end = run.end_within(Duration::ZERO);
        if end.is_none() {
            run.signal(LATER);
            end = Some(run.end());
        }
        let end = end.unwrap();
        assert!(ends.contains(&end.as_str()), "TERM after {moment:?}: {end}");
    }
}

/// Before its first instructions TERM ends it, afterwards COMMAND.
#[test]
fn term_within_the_first_20_ms() {
    ends_within_20_ms(|| Launch::of(Init::Outlast).not_pid_1(), |_| {}, &["143", "signal 15"]);
}

/// The kernel drops what is sent to PID 1 before it has blocked it: see the next test.
#[test]
fn term_within_the_first_20_ms_as_pid_1() {
    let blocked = |run: &Running| until("signals are blocked", || blocks_all(run.pid));
    ends_within_20_ms(|| Launch::of(Init::Outlast), blocked, &["143"]);
}

/// From exec on, counted one by one. tini-static needs 33,590, most of them in glibc's start-up.
#[test]
fn term_is_blocked_within_2_000_instructions() {
    let mut steps = 0;
    let mut run = Launch::of(Init::Outlast).not_pid_1().role("exit", &["7"]).traced();
    while mask(&status(run.pid), "SigBlk") & 1 << (libc::SIGTERM - 1) == 0 {
        run.step();
        steps += 1;
        assert!(steps <= 2_000);
    }
    println!("{steps} instructions");
    run.end_trace();
    assert_eq!(run.end(), "7");
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
}
