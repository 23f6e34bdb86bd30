//! The terminal: COMMAND has it where the init had it, and a shell above or below sees what it would see without one.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::process::{LONG, Launch, NEVER, Running, children, field, state, status, until, within};
use crate::sys::{self, libc};
use crate::table::{Init, rows};

/// A terminal, with a person in front of it.
struct Terminal {
    master: File,
    slave: OwnedFd,
    seen: String,
}

impl Terminal {
    fn new() -> Terminal {
        let (master, slave) = sys::terminal();
        Terminal { master: master.into(), slave, seen: String::new() }
    }

    fn types(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Reads until this is there; returns what was before it.
    fn reads(&mut self, text: &str) -> String {
        loop {
            if let Some((before, after)) = self.seen.split_once(text) {
                let (before, after) = (before.to_string(), after.to_string());
                self.seen = after;
                return before;
            }
            assert!(sys::readable(&self.master, LONG), "waited in vain for {text:?} after {:?}", self.seen);
            let mut more = [0; 4096];
            let count = self.master.read(&mut more).unwrap();
            self.seen.push_str(&String::from_utf8_lossy(&more[..count]));
        }
    }

    fn is_silent(&self) -> bool {
        !sys::readable(&self.master, Duration::ZERO)
    }

    /// The name of the process that leads the foreground.
    fn foreground(&self) -> String {
        field(&status(sys::foreground(&self.master)), "Name").unwrap_or_default()
    }

    fn shell(&self, launch: Launch) -> Running {
        let shell = ["/bin/bash", "--norc", "--noprofile", "-i"];
        let launch = launch.command(shell).env("PS1", "ready> ").env("TERM", "dumb").env("HISTFILE", "");
        launch.on_terminal(&self.slave).start()
    }

    /// What a person types to run COMMAND under the init.
    fn line(init: Init, command: &str) -> String {
        let argv = Launch::of(init).argv();
        let argv: Vec<&str> = argv.iter().map(|word| word.to_str().unwrap()).collect();
        format!("{} {command}", argv.join(" "))
    }
}

const CTRL_C: &str = "\x03";
const CTRL_Z: &str = "\x1a";

rows! {
    /// The session's leader, as PID 1 with a terminal is.
    fn what_command_has(init) {
        let mut terminal = Terminal::new();
        let mut run = Launch::of(init).role("terminal", &[]).on_terminal(&terminal.slave).start();
        terminal.reads("COMMAND has: ");
        let has = terminal.reads(".");
        assert_eq!(run.end(), "0");
        has
    }

    fn ctrl_c(init) {
        let mut terminal = Terminal::new();
        let run = Launch::of(init).role("report", &[]).on_terminal(&terminal.slave).start();
        terminal.reads("ready");
        let child = run.child();
        until("the init is idle", || run.is_idle());
        terminal.types(CTRL_C);
        // The terminal shows it when it has sent the signal.
        terminal.reads("^C");
        until("the init is idle", || run.is_idle());
        sys::kill(child, 64);
        let got = terminal.reads("64");
        let names: Vec<String> =
            got.split_whitespace().filter_map(|number| number.parse().ok()).map(sys::name).collect();
        names.join(" ")
    }

    fn an_interactive_shell_under_it(init) {
        let mut terminal = Terminal::new();
        let mut run = terminal.shell(Launch::of(init));
        terminal.reads("ready> ");
        terminal.types("sleep 1000\n");
        until("the job runs", || terminal.foreground() == "sleep");
        terminal.types(CTRL_Z);
        if !within(NEVER, || terminal.foreground() == "bash") {
            return "^Z does nothing".into();
        }
        terminal.reads("Stopped");
        terminal.reads("ready> ");
        terminal.types("fg\n");
        until("the job is resumed", || {
            terminal.foreground() == "sleep" && state(sys::foreground(&terminal.master)) == 'S'
        });
        terminal.types(CTRL_C);
        terminal.reads("ready> ");
        terminal.types("exit 3\n");
        format!("^Z, fg and ^C work, {}", run.end())
    }

    fn under_an_interactive_shell(init) {
        let mut terminal = Terminal::new();
        let shell = terminal.shell(Launch::plain().not_pid_1());
        terminal.reads("ready> ");
        terminal.types(&format!("{}\n", Terminal::line(init, "sleep 1000")));
        let mut found = None;
        until("COMMAND runs", || {
            found = sleeper(&shell);
            found.is_some()
        });
        let sleeper = found.unwrap();
        until("the init is idle", || state(parent(sleeper)) == 'S');
        terminal.types(CTRL_Z);
        if !within(NEVER, || terminal.foreground() == "bash") {
            return "^Z: the shell never comes back".into();
        }
        terminal.reads("Stopped");
        terminal.reads("ready> ");
        until("COMMAND stops", || state(sleeper) == 'T');
        terminal.types("fg\n");
        if !within(NEVER, || state(sleeper) == 'S') {
            return "^Z works, fg does not".into();
        }
        until("COMMAND has the terminal", || terminal.foreground() != "bash");
        terminal.types(CTRL_C);
        terminal.reads("ready> ");
        terminal.types("echo \"<$?>\"\n");
        terminal.reads("<$");
        terminal.reads("\n<");
        format!("^Z, fg and ^C work, {}", terminal.reads(">"))
    }

    fn started_in_the_background(init) {
        let mut terminal = Terminal::new();
        let shell = terminal.shell(Launch::plain().not_pid_1());
        terminal.reads("ready> ");
        // A shell takes the terminal for its prompt: the init starts after that.
        let line = Terminal::line(init, "sleep 1000");
        terminal.types(&format!("{{ kill -STOP $BASHPID; exec {line}; }} &\n"));
        let mut job = None;
        until("the job waits", || {
            job = children(shell.pid).first().copied();
            job.is_some_and(|job| state(job) == 'T')
        });
        terminal.reads("ready> ");
        until("the shell waits", || shell.is_idle());
        sys::kill(job.unwrap(), libc::SIGCONT);
        let mut found = None;
        until("COMMAND runs", || {
            found = sleeper(&shell);
            found.is_some()
        });
        until("the init is idle", || state(parent(found.unwrap())) == 'S');
        if terminal.foreground() == "bash" { "the shell keeps it".into() } else { "taken from the shell".into() }
    }

    /// COMMAND reads, and has to wait for `fg`.
    fn a_background_job_that_reads(init) {
        let mut terminal = Terminal::new();
        let shell = terminal.shell(Launch::plain().not_pid_1());
        terminal.reads("ready> ");
        terminal.types(&format!("{} &\n", Terminal::line(init, "/bin/sh -c 'read x; echo got=$x.'")));
        let stopped = within(NEVER, || {
            children(shell.pid).iter().any(|job| state(*job) == 'T') && terminal.foreground() == "bash"
        });
        if !stopped { return "the shell does not see it stop".into() }
        terminal.types("fg\n");
        until("the job has the terminal", || terminal.foreground() != "bash");
        terminal.types("abc\n");
        terminal.reads("got=abc.");
        "stops, and goes on with fg".into()
    }

    /// A session without a shell above: ^Z stops nothing that nobody could resume.
    fn ctrl_z_without_a_shell(init) {
        let mut terminal = Terminal::new();
        let run = Launch::of(init).role("ready", &[]).on_terminal(&terminal.slave).start();
        terminal.reads("ready");
        let child = run.child();
        until("the init is idle", || run.is_idle());
        terminal.types(CTRL_Z);
        terminal.reads("^Z");
        // The signal has been sent: COMMAND runs, to stop or go on. Stopped for a second, it stays so.
        let mut since = Instant::now();
        until("COMMAND sleeps or stays stopped", || match state(child) {
            'S' => true,
            'T' => since.elapsed() > Duration::from_secs(1),
            _ => {
                since = Instant::now();
                false
            }
        });
        if state(child) == 'T' { "stays stopped".into() } else { "goes on".into() }
    }

    /// The signals that the terminal sends when its session's leader lets go of it, or a group is moved: 100 starts.
    fn stray_signals_at_the_start(init) {
        let mut stray = BTreeSet::new();
        for _ in 0..100 {
            let mut terminal = Terminal::new();
            let launch = Launch::of(init).role("report", &[]).on_terminal(&terminal.slave).with(|| {
                sys::set_mask(u64::MAX);
                Ok(())
            });
            let mut run = launch.start();
            until("COMMAND runs, or has ended", || state(run.pid) == 'Z' || !terminal.is_silent());
            if state(run.pid) == 'Z' {
                stray.insert(run.end());
                continue;
            }
            terminal.reads("ready");
            until("the init is idle", || run.is_idle());
            sys::kill(run.child(), 64);
            stray.extend(terminal.reads("64").split_whitespace().filter_map(|n| n.parse().ok()).map(sys::name));
        }
        if stray.is_empty() { "none".into() } else { stray.into_iter().collect::<Vec<_>>().join(" ") }
    }

    /// Its other end is closed before the start, as when a connection breaks.
    fn a_terminal_that_hung_up(init) {
        let terminal = Terminal::new();
        let launch = Launch::of(init).role("exit", &["3"]).on_terminal(&terminal.slave).with(|| {
            sys::ignore(libc::SIGHUP);
            // SAFETY: no argument.
            sys::check(unsafe { libc::vhangup() }).map(drop)
        });
        launch.start().end()
    }
}

fn parent(pid: i32) -> i32 {
    field(&status(pid), "PPid").and_then(|pid| pid.parse().ok()).unwrap_or_default()
}

/// The `sleep` that the init under this shell has started.
fn sleeper(shell: &Running) -> Option<i32> {
    let jobs = children(shell.pid);
    jobs.into_iter().flat_map(children).find(|pid| field(&status(*pid), "Name").as_deref() == Some("sleep"))
}
