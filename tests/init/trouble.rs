//! Bounded trouble: what is missing, refused or broken around it stops neither the init nor COMMAND.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::process::{Launch, NEVER, state, until, within};
use crate::sys::{self, libc};
use crate::table::{Init, rows};

/// The flag that makes it write of every signal. tini warns at the start, where it is not PID 1.
fn verbose(init: Init) -> Option<&'static str> {
    match init {
        Init::Tini | Init::TiniStatic | Init::Catatonit => None,
        Init::Dumb => Some("-v"),
        Init::Outlast => Some("--log-level=debug"),
    }
}

/// Some signals, then TERM, at which COMMAND ends with status 3; with this as stderr.
fn with_stderr(init: Init, stderr: OwnedFd) -> String {
    let launch = Launch::of(init).flag(verbose(init)).not_pid_1().role("report", &["15", "3"]);
    let mut run = launch.stderr(stderr).start();
    // It may be stuck before it has started COMMAND.
    within(NEVER, || run.has_line() || state(run.pid) == 'Z');
    for _ in 0..5 {
        run.signal(libc::SIGUSR1);
    }
    run.signal(libc::SIGTERM);
    let Some(end) = run.end_within(NEVER) else {
        // What waits for a reader uses nothing at all.
        let before = cpu(run.pid);
        let loops = within(NEVER, || cpu(run.pid) > before);
        return if loops { "loops for ever".into() } else { "is stuck".into() };
    };
    let sent = ["ready", "10", "15"];
    let more: Vec<String> = run.rest().into_iter().filter(|line| !sent.contains(&line.as_str())).collect();
    if more.is_empty() { end } else { format!("{end}, and signal {}", more.join(" ")) }
}

/// In hundredths of a second.
fn cpu(pid: i32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    [11, 12].iter().filter_map(|n| fields.get(*n)?.parse::<u64>().ok()).sum()
}

/// Writes until nothing more fits. A terminal takes a moment to pass on what it has got, and then has room again.
fn fill(fd: &OwnedFd) {
    let flags = sys::check(file_flags(fd, libc::F_GETFL, 0)).unwrap();
    sys::check(file_flags(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)).unwrap();
    let mut idle = 0;
    while idle < 10 {
        idle += 1;
        for size in [65_536, 1] {
            while nix::unistd::write(fd, &vec![b'x'; size]).is_ok() {
                idle = 0;
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    sys::check(file_flags(fd, libc::F_SETFL, flags)).unwrap();
}

fn file_flags(fd: &OwnedFd, command: i32, flags: i32) -> i32 {
    // SAFETY: plain numbers.
    unsafe { libc::fcntl(fd.as_raw_fd(), command, flags) }
}

/// COMMAND ends with status 3 where all is well.
fn status_with(init: Init, setup: impl FnMut() -> io::Result<()> + Send + Sync + 'static) -> String {
    Launch::of(init).role("exit", &["3"]).with(setup).start().end()
}

rows! {
    fn stderr_that_no_one_can_read(init) {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        with_stderr(init, writer.into())
    }

    fn stderr_on_a_full_disk(init) {
        with_stderr(init, OpenOptions::new().write(true).open("/dev/full").unwrap().into())
    }

    fn stderr_a_full_pipe(init) {
        let (_reader, writer) = io::pipe().unwrap();
        let writer = OwnedFd::from(writer);
        fill(&writer);
        with_stderr(init, writer)
    }

    fn stderr_a_full_socket(init) {
        let (_reader, writer) = UnixStream::pair().unwrap();
        let writer = OwnedFd::from(writer);
        fill(&writer);
        with_stderr(init, writer)
    }

    /// ^S was typed, or no one reads the master.
    fn stderr_a_stopped_terminal(init) {
        let (_master, slave) = sys::terminal();
        fill(&slave);
        with_stderr(init, slave)
    }

    fn no_proc(init) {
        status_with(init, || sys::mount(Some(c"tmpfs"), None, c"/proc", 0, None))
    }

    /// Other users' processes are hidden, PID 1's among them.
    fn proc_with_hidepid(init) {
        status_with(init, || {
            sys::mount(Some(c"proc"), None, c"/proc", 0, Some(c"hidepid=2"))?;
            sys::become_user(54_319)
        })
    }

    fn a_read_only_root(init) {
        status_with(init, || {
            sys::mount(None, None, c"/", libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY, None)
        })
    }

    /// And stdin, stdout, stderr closed.
    fn no_dev(init) {
        status_with(init, || {
            sys::mount(Some(c"tmpfs"), None, c"/dev", 0, None)?;
            // SAFETY: plain numbers.
            unsafe {
                for fd in 0..=2 {
                    libc::close(fd);
                }
            }
            Ok(())
        })
    }

    fn stdin_closed(init) {
        status_with(init, || {
            // SAFETY: plain numbers.
            sys::check(unsafe { libc::close(0) }).map(drop)
        })
    }

    /// A closed fd stays closed for COMMAND.
    fn stdin_closed_for_command(init) {
        let mut run = Launch::of(init).command(["/bin/ls", "-L", "/proc/self/fd"]).with(|| {
            // SAFETY: plain numbers.
            sys::check(unsafe { libc::close(0) }).map(drop)
        }).start();
        let fds = run.rest();
        if fds.is_empty() { return "not started".into() }
        // 0 is then the directory that ls reads.
        if fds.contains(&"3".to_string()) { "open".into() } else { "closed".into() }
    }

    /// As PID 1 and as another.
    fn prctl_refused(init) {
        let end = |launch: Launch| {
            let launch = launch.role("exit", &["3"]);
            launch.with(|| sys::refuse(&[libc::SYS_prctl], libc::EPERM)).start().end()
        };
        let ends = [end(Launch::of(init)), end(Launch::of(init).not_pid_1())];
        if ends[0] == ends[1] { ends[0].clone() } else { ends.join("; not as PID 1: ") }
    }

    /// Where the kernel or a profile knows none of the newer calls.
    fn newer_calls_refused(init) {
        status_with(init, || {
            let calls = [libc::SYS_close_range, libc::SYS_pwritev2, libc::SYS_clone3, libc::SYS_pidfd_open,
                libc::SYS_statx, libc::SYS_getrandom, libc::SYS_socket, libc::SYS_faccessat2];
            sys::refuse(&calls, libc::ENOSYS)
        })
    }

    /// What it says, before COMMAND runs, where it is not PID 1.
    fn lines_when_not_pid_1(init) {
        let run = Launch::of(init).not_pid_1().role("ready", &[]).start().ready();
        until("it is idle", || run.is_idle());
        match run.stderr().lines().count() {
            0 => "none".into(),
            count => count.to_string(),
        }
    }

    /// The init is killed: its child gets TERM.
    fn killed_when_not_pid_1(init) {
        let mut run = Launch::of(init).not_pid_1().role("report", &[]).start().ready();
        let child = run.child();
        run.signal(libc::SIGKILL);
        run.end();
        sys::kill(child, 64);
        let got = run.lines_until("64");
        sys::kill(child, libc::SIGKILL);
        if got == ["15"] { "gets TERM".into() } else { format!("gets {}", if got.is_empty() { "nothing".into() } else { got.join(" ") }) }
    }
}

/// What cannot be done without is said, and COMMAND is not started.
#[test]
fn no_queue_of_signals() {
    let launch = Launch::of(Init::Outlast).role("exit", &["3"]);
    let mut run = launch.with(|| sys::refuse(&[libc::SYS_signalfd4], libc::EPERM)).start();
    assert_eq!(run.end(), "125");
    assert!(run.stderr().contains("cannot open the queue of signals"), "{}", run.stderr());
}

/// Lines that find no room are counted, and the next one that does says so.
#[test]
fn dropped_lines_are_counted() {
    let (mut reader, writer) = io::pipe().unwrap();
    let writer = OwnedFd::from(writer);
    fill(&writer);
    let run = Launch::of(Init::Outlast).flag(verbose(Init::Outlast)).role("report", &["15", "3"]);
    let mut run = run.stderr(writer).start().ready();
    until("it is idle", || run.is_idle());
    // The start was not said. Now there is room for the end.
    let mut room = vec![0; 65_536];
    io::Read::read_exact(&mut reader, &mut room).unwrap();
    run.signal(libc::SIGTERM);
    assert_eq!(run.end(), "3");
    drop(run);
    let mut said = String::new();
    io::Read::read_to_string(&mut reader, &mut said).unwrap();
    assert!(said.contains("lines_dropped=1"), "{said}");
}

/// A hold reads /proc and asks the kernel for sockets: where both are refused it ends at its timeout, and never before.
#[test]
fn a_hold_that_sees_nothing() {
    let launch = Launch::of(Init::Outlast).flag(Some("--timeout=2s")).role("report", &["15", "3"]);
    let mut run = launch
        .with(|| {
            sys::mount(Some(c"tmpfs"), None, c"/proc", 0, None)?;
            sys::refuse(&[libc::SYS_socket], libc::EPERM)
        })
        .start()
        .ready();
    let start = Instant::now();
    run.signal(libc::SIGTERM);
    assert_eq!(run.end(), "3");
    assert!(start.elapsed() >= Duration::from_secs(2), "{}", run.stderr());
    assert!(run.stderr().contains("reason=timeout"), "{}", run.stderr());
}
