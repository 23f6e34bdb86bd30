//! Containers and what is executed inside them.

use crate::log::Log;
use crate::netns::Netns;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Code(i32),
    Signal(i32),
}

/// The end of a process.
#[derive(Clone, Copy, Debug)]
pub struct Exit {
    pub at: Instant,
    pub status: Status,
}

/// A container by its PID 1, or a process executed inside one.
#[derive(Debug)]
pub struct Process {
    /// As the host sees it.
    pid: i32,
    exit: Arc<(Mutex<Option<Exit>>, Condvar)>,
    /// The process is killed when this closes.
    lifeline: Mutex<Option<ChildStdin>>,
}

/// Whose restrictions a process runs under.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    pub(crate) uid: u32,
    pub(crate) read_only: bool,
    /// Host file and name in the container.
    pub(crate) programs: Vec<(PathBuf, String)>,
    pub(crate) env: BTreeMap<String, String>,
}

impl Spec {
    /// Starts a container in `netns`; returns once its PID 1 has been executed.
    pub(crate) fn run(&self, netns: &Netns, argv: &[String], log: &Arc<Log>) -> Result<Process> {
        let mut shim = self.shim("run");
        if self.read_only {
            shim.arg("--read-only");
        }
        for (file, name) in &self.programs {
            let file = file.to_str().context("a path that is not UTF-8")?;
            shim.arg(format!("--bind={file}={name}"));
        }
        shim.arg("--").args(argv);
        Process::start(netns.run(|| shim.spawn()), self.name, log)
    }

    /// Starts a process inside the container of `init`.
    pub(crate) fn exec(
        &self,
        init: &Process,
        argv: &[String],
        log: &Arc<Log>,
        source: &str,
    ) -> Result<Process> {
        let mut shim = self.shim("exec");
        shim.arg(format!("--pid={}", init.pid)).arg("--").args(argv);
        Process::start(shim.spawn(), source, log)
    }

    fn shim(&self, verb: &str) -> Command {
        // Another of the fixture's programs may stand in for it: scripts/test-images has podman make the containers.
        let program = env::var("POD_SHIM").unwrap_or_else(|_| "shim".to_owned());
        let mut shim = Command::new(programs().join(program));
        shim.arg(verb).arg(format!("--uid={}", self.uid));
        shim.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin").envs(&self.env);
        // Its own group: Ctrl-C reaches the fixture only, whose end then ends the containers.
        shim.process_group(0).current_dir("/");
        shim.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        shim
    }
}

impl Process {
    fn start(shim: std::io::Result<Child>, source: &str, log: &Arc<Log>) -> Result<Self> {
        let mut shim = shim.context("the fixture's shim cannot be started: see scripts/test")?;
        let lifeline = shim.stdin.take();
        let stderr = log.drain(source, shim.stderr.take().unwrap());
        let mut stdout = BufReader::new(shim.stdout.take().unwrap());
        let mut first = String::new();
        stdout.read_line(&mut first)?;
        let Some(pid) = first.trim().strip_prefix("pid ") else {
            // Its reason is on stderr.
            shim.wait()?;
            stderr.join().unwrap();
            let said: Vec<_> =
                log.lines().into_iter().filter(|l| l.source == source).map(|l| l.text).collect();
            bail!("{source} could not be started: {}", said.join(" "));
        };
        let pid = pid.parse()?;
        let exit = Arc::new((Mutex::new(None), Condvar::new()));
        let ended = Arc::clone(&exit);
        let (log, source) = (Arc::clone(log), source.to_owned());
        thread::spawn(move || {
            let mut rest = String::new();
            let _ = stdout.read_to_string(&mut rest);
            let _ = shim.wait();
            let end = parse_exit(&rest).unwrap_or(Exit { at: Instant::now(), status: Status::Signal(0) });
            // All that it wrote is in the log before its exit is known.
            let _ = stderr.join();
            log.push(&source, format!("({:?})", end.status));
            *ended.0.lock().unwrap() = Some(end);
            ended.1.notify_all();
        });
        Ok(Self { pid, exit, lifeline: Mutex::new(lifeline) })
    }

    /// Its process id on the host.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        *self.exit.0.lock().unwrap()
    }

    /// Waits for its end.
    pub fn wait(&self, at_most: Duration) -> Option<Exit> {
        let exit = self.exit.0.lock().unwrap();
        *self.exit.1.wait_timeout_while(exit, at_most, |exit| exit.is_none()).unwrap().0
    }

    /// Sends a signal, unless it has ended.
    pub fn signal(&self, signal: Signal) {
        if self.exit().is_none() {
            let _ = kill(Pid::from_raw(self.pid), signal);
        }
    }

    /// Whether the process blocks, catches or ignores `signal`: PID 1 loses a signal for which it does not.
    pub fn handles(&self, signal: Signal) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let bit = 1u64 << (signal as u32 - 1);
        let masks = status.lines().filter_map(|l| l.split_once(":\t"));
        masks
            .filter(|(name, _)| ["SigBlk", "SigCgt", "SigIgn"].contains(name))
            .any(|(_, mask)| u64::from_str_radix(mask, 16).unwrap_or(0) & bit != 0)
    }

    /// The host's process ids of those in the same PID namespace that are called `comm`.
    pub fn others(&self, comm: &str) -> Vec<i32> {
        let namespace = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let Some(own) = namespace(self.pid) else { return Vec::new() };
        let pids =
            std::fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
        let called =
            |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.trim() == comm);
        pids.filter(|pid| called(pid) && namespace(*pid).as_ref() == Some(&own)).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.lifeline.lock().unwrap().take();
        self.wait(Duration::from_secs(10));
    }
}

/// `exit NANOSECONDS code|signal N`
fn parse_exit(line: &str) -> Option<Exit> {
    let mut words = line.split_whitespace().skip(1);
    let at = Duration::from_nanos(words.next()?.parse().ok()?);
    let status = match (words.next()?, words.next()?.parse().ok()?) {
        ("code", code) => Status::Code(code),
        (_, signal) => Status::Signal(signal),
    };
    Some(Exit { at: instant(at)?, status })
}

/// A time of `CLOCK_MONOTONIC`: `Instant` reads the same clock but does not show it.
pub fn instant(at: Duration) -> Option<Instant> {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).ok()?;
    Instant::now().checked_sub(Duration::from(now).saturating_sub(at))
}

/// The repository.
pub(crate) fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("tests/support has two parents")
}

/// The static binary under test.
pub fn outlast() -> PathBuf {
    let path = repository().join("target/static/x86_64/outlast");
    assert!(path.exists(), "there is no static binary: scripts/test builds it, scripts/build-static alone");
    path
}

/// The directory of the fixture's own programs. Under cargo they are built first, so that they are never stale.
pub(crate) fn programs() -> &'static Path {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    PROGRAMS.get_or_init(|| find_programs().unwrap_or_else(|error| panic!("{error:#}")))
}

fn find_programs() -> Result<PathBuf> {
    let exe = env::current_exe()?;
    let dir = exe.parent().context("no directory")?;
    let dir = if dir.ends_with("deps") { dir.parent().context("no directory")? } else { dir };
    if let Some(cargo) = env::var_os("CARGO") {
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package=pod", "--bins"]).current_dir(repository());
        // What cargo tells a program that it runs would make build scripts that look at it run again.
        let of_ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_ours)) {
            build.env_remove(name);
        }
        if dir.ends_with("release") {
            build.arg("--release");
        }
        ensure!(build.status()?.success(), "the fixture's programs cannot be built");
    }
    ensure!(
        dir.join("shim").exists(),
        "the fixture's programs are not in {}: see scripts/test",
        dir.display()
    );
    Ok(dir.to_owned())
}
