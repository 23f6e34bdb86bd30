//! Every orphan is reaped, and none of them is taken for COMMAND.

use std::fs;

use crate::process::{Launch, NEVER, Running, children, number, processes, state, until};
use crate::sys::{self, libc};
use crate::table::{Init, rows};

/// Processes that ended and that PID 1 has not reaped.
fn zombies(proc: &str) -> usize {
    processes(proc).iter().filter(|(_, parent, state)| *parent == 1 && *state == 'Z').count()
}

rows! {
    /// Orphans that end later and zombies whose parent ends: a thousand of each.
    fn orphans_as_pid_1(init) {
        let run = Launch::of(init).role("orphans", &["1000", "1000"]).with_stdin_pipe().start().ready();
        let proc = run.proc();
        until("the zombies are reaped", || zombies(&proc) == 0);
        let living = processes(&proc).iter().filter(|(_, parent, _)| *parent == 1).count() - 1;
        format!("adopts {living}")
    }

    fn an_orphan_not_as_pid_1(init) {
        let mut run = Launch::of(init).not_pid_1().role("orphan", &[]).with_stdin_pipe().start();
        let (orphan, adopter) = adoption(&mut run);
        sys::kill(orphan, libc::SIGKILL);
        if adopter == run.pid { "adopts".into() } else { "leaves it".into() }
    }

    /// All end while the init is stopped: one SIGCHLD stands for a thousand orphans and COMMAND.
    fn the_status_is_not_an_orphans(init) {
        let mut run = Launch::of(init).role("orphans", &["0", "1000"]).with_stdin_pipe().start().ready();
        run.signal(libc::SIGSTOP);
        until("the init stops", || state(run.pid) == 'T');
        run.close_stdin();
        let proc = run.proc();
        until("all have ended", || zombies(&proc) == 1_001);
        run.signal(libc::SIGCONT);
        run.end()
    }

    /// COMMAND and a thousand orphans end at the same time: 20 times.
    fn a_thousand_end_with_it(init) {
        let ends = (0..20).map(|_| {
            let mut run = Launch::of(init).role("orphans", &["0", "300"]).with_stdin_pipe().start().ready();
            run.close_stdin();
            run.end()
        });
        let mut ends: Vec<_> = ends.collect();
        ends.dedup();
        ends.join(", ")
    }

    /// Who starts it ignores SIGCHLD: the kernel then reaps by itself and tells nobody.
    fn sigchld_ignored_at_the_start(init) {
        let mut run = Launch::of(init).role("exit", &["7"]).with(|| {
            sys::ignore(libc::SIGCHLD);
            Ok(())
        }).start();
        run.end_within(NEVER).unwrap_or_else(|| "hangs for ever".into())
    }

    /// A zombie whose parent lives is its parent's.
    fn a_zombie_of_another(init) {
        let mut run = Launch::of(init).role("zombie", &[]).start().ready();
        let child = run.child();
        assert_eq!(children(child).len(), 1);
        run.signal(libc::SIGTERM);
        run.end()
    }

    /// COMMAND has ended, an orphan lives.
    fn an_orphan_that_outlives_it(init) {
        let mut run = Launch::of(init).not_pid_1().role("orphan", &[]).with_stdin_pipe().start();
        let (orphan, _) = adoption(&mut run);
        let mut run = run.ready();
        run.close_stdin();
        run.end();
        sys::kill(orphan, 64);
        let got = run.lines_until("64");
        sys::kill(orphan, libc::SIGKILL);
        if got.is_empty() { "leaves it".into() } else { format!("sends {}", got.join(" ")) }
    }
}

/// An orphan's pid, and that of its new parent.
fn adoption(run: &mut Running) -> (i32, i32) {
    let line = run.line().unwrap();
    let (orphan, adopter) = line.split_once(" adopted by ").unwrap();
    (orphan.parse().unwrap(), adopter.parse().unwrap())
}

/// A hold does not keep it from reaping, nor from seeing COMMAND end.
#[test]
fn orphans_in_a_hold() {
    let mut launch = Launch::of(Init::Outlast);
    for flag in ["--timeout=1000s", "--grace-period=1100s", "--min-wait=1000s"] {
        launch = launch.flag(Some(flag));
    }
    let mut run = launch.role("orphans", &["1000", "0"]).with_stdin_pipe().start().ready();
    // COMMAND would end of TERM; only outlast gets it, and holds.
    run.signal(libc::SIGTERM);
    until("the hold starts", || run.stderr().contains("hold started"));
    run.write_stdin();
    let mut run = run.ready();
    let proc = run.proc();
    until("the zombies are reaped", || zombies(&proc) == 0);
    run.close_stdin();
    assert_eq!(run.end(), "7");
    assert!(run.stderr().contains("reason=proxy-gone"), "{}", run.stderr());
}

/// 100,000 orphans and 100,000 signals, as PID 1: all are reaped, and the memory is as it was.
#[test]
fn a_hundred_thousand_orphans_and_signals() {
    let mut run =
        Launch::of(Init::Outlast).role("orphans", &["10000", "0"]).with_stdin_pipe().start().ready();
    let proc = run.proc();
    let reaped = || until("the zombies are reaped", || zombies(&proc) == 0);
    // status has it rounded; this is exact.
    let memory = |pid: i32| number(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap(), "Rss");
    reaped();
    let before = memory(run.pid);
    for _ in 0..10 {
        run.write_stdin();
        // WINCH does nothing to who does not ask for it.
        (0..10_000).for_each(|_| run.signal(libc::SIGWINCH));
        run = run.ready();
        reaped();
    }
    let after = memory(run.pid);
    println!("resident: {before} KiB before, {after} KiB after");
    assert!(before > 0 && after.abs_diff(before) * 20 <= before, "{before} KiB before, {after} KiB after");
    run.close_stdin();
    assert_eq!(run.end(), "7");
}
