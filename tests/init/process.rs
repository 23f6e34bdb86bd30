//! An init under test: how it is started, and what can be seen of it from outside.

use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::sys::{self, libc};
use crate::table::Init;

/// Longest wait for what is certain to come; only a failure gets there.
pub const LONG: Duration = Duration::from_secs(60);
/// What has not come by now is taken never to come.
pub const NEVER: Duration = Duration::from_secs(5);

/// Waits until it is so.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    assert!(within(LONG, &mut so), "waited in vain: {what}");
}

/// Whether it becomes so within the time.
pub fn within(time: Duration, mut so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !so() {
        if start.elapsed() > time {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// What the test binary does as COMMAND: see `child.rs`.
pub fn role(role: &str, arguments: &[&str]) -> Vec<OsString> {
    let mut command = vec![std::env::current_exe().unwrap().into(), OsString::from(format!("child:{role}"))];
    command.extend(arguments.iter().map(OsString::from));
    command
}

pub type Setup = Box<dyn FnMut() -> io::Result<()> + Send + Sync>;

/// How an init, or for comparison a plain COMMAND, is to be started.
pub struct Launch {
    before: Vec<OsString>,
    command: Vec<OsString>,
    pid_1: bool,
    setup: Vec<Setup>,
    stdin: Option<OwnedFd>,
    stdin_writer: Option<io::PipeWriter>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    environment: Vec<(OsString, OsString)>,
    raw_environment: Option<Vec<CString>>,
}

impl Launch {
    /// The init as PID 1, without a hold.
    pub fn of(init: Init) -> Launch {
        let mut before = vec![init.path().into()];
        if init == Init::Outlast {
            before.extend(["run", "--timeout=0s"].map(OsString::from));
        }
        Launch::plain().replace(before)
    }

    /// No init at all.
    pub fn plain() -> Launch {
        Launch {
            before: Vec::new(),
            command: Vec::new(),
            pid_1: true,
            setup: Vec::new(),
            stdin: None,
            stdin_writer: None,
            stdout: None,
            stderr: None,
            environment: Vec::new(),
            raw_environment: None,
        }
    }

    fn replace(mut self, before: Vec<OsString>) -> Launch {
        self.before = before;
        self
    }

    /// The init's own flag, if it has one for this.
    pub fn flag(mut self, flag: Option<&str>) -> Launch {
        self.before.extend(flag.map(OsString::from));
        self
    }

    pub fn role(self, role: &str, arguments: &[&str]) -> Launch {
        self.command(self::role(role, arguments))
    }

    pub fn command<S: AsRef<OsStr>>(mut self, command: impl IntoIterator<Item = S>) -> Launch {
        self.command = command.into_iter().map(|word| word.as_ref().to_owned()).collect();
        self
    }

    pub fn not_pid_1(mut self) -> Launch {
        self.pid_1 = false;
        self
    }

    /// Done between fork and exec, after all that the fixture does there: system calls only.
    pub fn with(mut self, setup: impl FnMut() -> io::Result<()> + Send + Sync + 'static) -> Launch {
        self.setup.push(Box::new(setup));
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Launch {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// With [`Running::close_stdin`] COMMAND reads the end of it.
    pub fn with_stdin_pipe(mut self) -> Launch {
        let (reader, writer) = io::pipe().unwrap();
        self.stdin = Some(reader.into());
        self.stdin_writer = Some(writer);
        self
    }

    /// Just this, entry by entry.
    pub fn raw_environment(mut self, entries: Vec<CString>) -> Launch {
        self.raw_environment = Some(entries);
        self
    }

    pub fn stdout(mut self, fd: OwnedFd) -> Launch {
        self.stdout = Some(fd);
        self
    }

    pub fn stderr(mut self, fd: OwnedFd) -> Launch {
        self.stderr = Some(fd);
        self
    }

    /// Leader of a new session, with the terminal as stdin, stdout and stderr.
    pub fn on_terminal(mut self, slave: &OwnedFd) -> Launch {
        self.stdin = Some(slave.try_clone().unwrap());
        self.stdout = Some(slave.try_clone().unwrap());
        self.stderr = Some(slave.try_clone().unwrap());
        self.with(sys::own_terminal)
    }

    pub fn argv(&self) -> Vec<OsString> {
        let mut argv = self.before.clone();
        if !argv.is_empty() {
            argv.push("--".into());
        }
        argv.extend(self.command.iter().cloned());
        argv
    }

    pub fn start(self) -> Running {
        self.try_start().unwrap()
    }

    pub fn try_start(self) -> io::Result<Running> {
        let argv = self.argv();
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).envs(self.environment);
        command.stdin(self.stdin.map_or_else(Stdio::null, Stdio::from));
        let stderr = File::from(self.stderr.unwrap_or_else(sys::memory_file));
        command.stderr(stderr.try_clone()?);
        let (reader, writer) = io::pipe()?;
        command.stdout(self.stdout.map_or_else(|| Stdio::from(writer), Stdio::from));
        let mut setup = self.setup;
        if let Some(entries) = self.raw_environment {
            setup.push(sys::execution(&argv, entries));
        }
        let pid_1 = self.pid_1;
        // SAFETY: between fork and exec only system calls are made.
        unsafe {
            command.pre_exec(move || {
                // Nothing outlives the test.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if pid_1 {
                    sys::unshare(libc::CLONE_NEWNS)?;
                    sys::mount(None, None, c"/", libc::MS_REC | libc::MS_PRIVATE, None)?;
                    sys::mount(Some(c"proc"), None, c"/proc", 0, None)?;
                }
                // As a container's runtime starts it. glibc's posix_spawn ignores the signals that it keeps for itself.
                sys::set_mask(0);
                (1..=64).for_each(|signal| sys::set_disposition(signal, libc::SIG_DFL));
                setup.iter_mut().try_for_each(|setup| setup())
            });
        }
        let child = if pid_1 {
            // The next child of this thread is PID 1 of a namespace; those after it are as ever.
            let own = File::open("/proc/thread-self/ns/pid_for_children")?;
            sys::unshare(libc::CLONE_NEWPID)?;
            let child = command.spawn();
            // SAFETY: plain numbers.
            sys::check(unsafe { libc::setns(own.as_raw_fd(), libc::CLONE_NEWPID) })?;
            child?
        } else {
            command.spawn()?
        };
        drop(command);
        let pid = child.id().cast_signed();
        Ok(Running { pid, child, stdin: self.stdin_writer, reader, read: String::new(), stderr, pid_1, argv })
    }
}

impl Launch {
    /// Starts it, and stops it before its first instruction. This thread alone may go on with it.
    pub fn traced(self) -> Running {
        let run = self.with(sys::trace_me).start();
        sys::wait_for_stop(run.pid);
        run
    }
}

/// A started init.
pub struct Running {
    pub pid: i32,
    child: Child,
    stdin: Option<io::PipeWriter>,
    reader: io::PipeReader,
    read: String,
    stderr: File,
    pid_1: bool,
    argv: Vec<OsString>,
}

impl Running {
    /// The next line on stdout; none when no process has it open any more.
    pub fn line(&mut self) -> Option<String> {
        loop {
            if let Some((line, rest)) = self.read.split_once('\n') {
                let (line, rest) = (line.to_string(), rest.to_string());
                self.read = rest;
                return Some(line);
            }
            assert!(sys::readable(&self.reader, LONG), "waited in vain for a line after {:?}", self.read);
            let mut more = vec![0; 65_536];
            let count = self.reader.read(&mut more).unwrap();
            if count == 0 {
                return None;
            }
            self.read.push_str(&String::from_utf8_lossy(&more[..count]));
        }
    }

    /// Something is there to be read.
    pub fn has_line(&self) -> bool {
        sys::readable(&self.reader, Duration::ZERO)
    }

    /// Reads until this line has come; returns those before it.
    pub fn lines_until(&mut self, last: &str) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some(line) = self.line() {
            if line == last {
                return lines;
            }
            lines.push(line);
        }
        panic!("{:?}: {last:?} did not come, but {lines:?}; stderr: {}", self.argv, self.stderr())
    }

    /// Waits for COMMAND to say that it is ready.
    pub fn ready(mut self) -> Running {
        assert_eq!(self.lines_until("ready"), Vec::<String>::new());
        self
    }

    /// One instruction.
    pub fn step(&mut self) {
        sys::trace(libc::PTRACE_SINGLESTEP, self.pid);
        sys::wait_for_stop(self.pid);
    }

    pub fn end_trace(&mut self) {
        sys::trace(libc::PTRACE_DETACH, self.pid);
    }

    /// COMMAND after its init has ended: the one that has our pipe.
    pub fn orphan(&self) -> i32 {
        let pipe = fs::read_link(format!("/proc/self/fd/{}", self.reader.as_raw_fd())).unwrap();
        let has_pipe = |pid: i32| fs::read_link(format!("/proc/{pid}/fd/1")).is_ok_and(|file| file == pipe);
        processes("/proc").into_iter().map(|(pid, ..)| pid).find(|pid| has_pipe(*pid)).unwrap()
    }

    /// All of stdout that is left.
    pub fn rest(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.line()).collect()
    }

    pub fn write_stdin(&mut self) {
        self.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    }

    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    pub fn signal(&self, signal: i32) {
        sys::kill(self.pid, signal);
    }

    pub fn stderr(&self) -> String {
        let mut text = vec![0; 65_536];
        let count = self.stderr.read_at(&mut text, 0).unwrap_or_default();
        String::from_utf8_lossy(&text[..count]).into_owned()
    }

    /// `7`, or `signal 9`.
    pub fn end(&mut self) -> String {
        self.end_within(LONG)
            .unwrap_or_else(|| panic!("{:?} does not end; stderr: {}", self.argv, self.stderr()))
    }

    pub fn end_within(&mut self, time: Duration) -> Option<String> {
        if !sys::readable(&sys::pidfd(self.pid), time) {
            return None;
        }
        let status = self.child.wait().unwrap();
        Some(match (status.code(), status.signal()) {
            (Some(code), _) => code.to_string(),
            (None, signal) => format!("signal {}", signal.unwrap_or_default()),
        })
    }

    /// COMMAND's process id as the test sees it.
    pub fn child(&self) -> i32 {
        let mut found = None;
        until("the init has a child", || {
            found = children(self.pid).first().copied();
            found.is_some()
        });
        found.unwrap()
    }

    /// The process list as the init sees it, which also is quicker to look at.
    pub fn proc(&self) -> String {
        if self.pid_1 { format!("/proc/{}/root/proc", self.pid) } else { "/proc".into() }
    }

    /// It sleeps, and has no signal left to take.
    pub fn is_idle(&self) -> bool {
        let sleeps = || {
            let all = status(self.pid);
            // What glibc keeps for itself stays pending for ever.
            let pending = mask(&all, "ShdPnd") & !(0b11 << 31);
            let asleep = field(&all, "State").is_some_and(|state| state.starts_with('S'));
            (asleep && pending == 0).then(|| number(&all, "voluntary_ctxt_switches"))
        };
        // The file is no picture of one moment: it may have slept at its first line and taken the signal by a later
        // one. Twice the same number says that it has not run in between.
        let first = sleeps();
        first.is_some() && first == sleeps()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Under PID 1 everything ends with it.
        let others = if self.pid_1 { Vec::new() } else { children(self.pid) };
        let _ = self.child.kill();
        for pid in others {
            // SAFETY: plain numbers.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        let _ = self.child.wait();
    }
}

pub fn status(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default()
}

/// A value of a `status` file.
pub fn field(status: &str, key: &str) -> Option<String> {
    status.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim().to_string()))
}

/// A set of signals of a `status` file: bit n-1 is signal n.
pub fn mask(status: &str, key: &str) -> u64 {
    field(status, key).and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or_default()
}

pub fn number(status: &str, key: &str) -> u64 {
    let value = field(status, key).unwrap_or_default();
    value.split_whitespace().next().and_then(|value| value.parse().ok()).unwrap_or_default()
}

/// `R`, `S`, `T`, `Z` …; a space for no process.
pub fn state(pid: i32) -> char {
    field(&status(pid), "State").and_then(|state| state.chars().next()).unwrap_or(' ')
}

/// Every process with its parent and its state, as this mount of /proc numbers them.
pub fn processes(proc: &str) -> Vec<(i32, i32, char)> {
    let Ok(all) = fs::read_dir(proc) else { return Vec::new() };
    all.filter_map(|entry| {
        let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(format!("{proc}/{pid}/stat")).ok()?;
        let mut after_name = stat.rsplit_once(')')?.1.split_whitespace();
        let state = after_name.next()?.chars().next()?;
        Some((pid, after_name.next()?.parse().ok()?, state))
    })
    .collect()
}

pub fn children(pid: i32) -> Vec<i32> {
    processes("/proc").into_iter().filter(|(_, parent, _)| *parent == pid).map(|(child, ..)| child).collect()
}
