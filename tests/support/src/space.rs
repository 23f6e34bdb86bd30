//! A container without a mesh: a PID 1 with a network, processes and mounts of its own, and the host's files.

use crate::container::programs;
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// Only a failure takes so long.
const LONG: Duration = Duration::from_secs(60);

/// Waits until it is so.
pub fn await_that(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// What runs a program as Istio's proxy: uid 1337, no capability. setpriv keeps some until its exec, and could read what
/// is not readable: hence the second one, of env.
pub const AS_PROXY: &[&str] =
    &["setpriv", "--reuid=1337", "--regid=1337", "--clear-groups", "--inh-caps=-all", "env"];

/// One of the fixture's own programs: `application`, `pilot-agent`, `sockets`.
pub fn program(name: &str) -> PathBuf {
    programs().join(name)
}

/// A directory of programs under names of their own; everyone may run them.
#[derive(Debug)]
pub struct Programs(tempfile::TempDir);

impl Default for Programs {
    fn default() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        Self(directory)
    }
}

impl Programs {
    /// Copies a program; returns the copy's path.
    pub fn copy(&self, program: impl AsRef<Path>, name: &str) -> String {
        let path = self.0.path().join(name);
        // By a process of its own: while this one had the copy open for writing, a process that another thread forks
        // could inherit that, and the kernel refuses to run what is open for writing.
        assert!(Command::new("cp").arg(program.as_ref()).arg(&path).status().unwrap().success());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Dropping it ends every process in it.
#[derive(Debug)]
pub struct Space {
    unshare: Child,
    /// PID 1, as the host numbers it.
    pub init: i32,
    stderr: PathBuf,
    /// What was started inside and ends with PID 1.
    children: Mutex<Vec<Child>>,
    _files: tempfile::TempDir,
}

impl Space {
    /// Starts `argv` as PID 1, which says `ready`.
    pub fn start(argv: &[&str]) -> Self {
        let space = Self::start_with("", argv);
        space.await_ready();
        space
    }

    /// Does `setup`, shell commands, as root before `argv`; returns when `argv` is being executed.
    pub fn start_with(setup: &str, argv: &[&str]) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "namespaces want root: see scripts/test");
        let files = tempfile::tempdir().unwrap();
        let stderr = files.path().join("stderr");
        let mut unshare = Command::new("unshare")
            .args(["--net", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"])
            // Its own stderr may be opened again by whoever runs in the container, as under a container runtime.
            .arg(format!("chmod 666 {}; ip link set lo up; {setup}\nexec \"$@\"", stderr.display()))
            .arg("sh")
            .args(argv)
            .stdin(Stdio::null())
            .stderr(File::create(&stderr).unwrap())
            .spawn()
            .unwrap();
        fs::set_permissions(files.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let children = format!("/proc/{0}/task/{0}/children", unshare.id());
        let mut init = 0;
        await_that("the container's PID 1", || {
            let ended = unshare.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", fs::read_to_string(&stderr).unwrap());
            init = fs::read_to_string(&children).unwrap().trim().parse().unwrap_or(0);
            let name = fs::read_to_string(format!("/proc/{init}/comm")).unwrap_or_default();
            !["", "unshare", "sh", "setpriv"].contains(&name.trim())
        });
        Self { unshare, init, stderr, children: Mutex::default(), _files: files }
    }

    /// A command inside.
    pub fn command(&self, argv: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--pid", "--mount", "--target", &self.init.to_string(), "--"]).args(argv);
        command
    }

    /// Starts a process inside that says `ready` on stderr. It ends with PID 1.
    pub fn spawn(&self, argv: &[&str]) {
        let mut child = self.command(argv).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let ready = lines.find(|line| line.as_ref().is_ok_and(|line| line == "ready"));
        assert!(ready.is_some(), "{argv:?} has ended");
        thread::spawn(move || lines.for_each(drop));
        self.keep(child);
    }

    /// Waits for `child` when PID 1 has ended, and the child with it.
    pub fn keep(&self, child: Child) {
        self.children.lock().unwrap().push(child);
    }

    /// Does something in the container's network, in a thread.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let network = File::open(format!("/proc/{}/ns/net", self.init)).unwrap();
        let work = || {
            setns(network, CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        thread::scope(|scope| scope.spawn(work).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// The host's numbers of the processes inside that are called so.
    pub fn called(&self, comm: &str) -> Vec<i32> {
        let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own = namespace(self.init);
        let pids = fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
        let called =
            |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == comm);
        pids.filter(|pid| called(pid) && namespace(*pid) == own).collect()
    }

    /// Signals every process inside that is called so; waits until there is one.
    pub fn signal(&self, comm: &str, signal: Signal) {
        await_that(comm, || !self.called(comm).is_empty());
        for pid in self.called(comm) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// What PID 1 and its like have written so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap()
    }

    /// Waits until a process has said `ready`, and nothing else on that line.
    pub fn await_ready(&self) {
        await_that("a process that is ready", || self.log().lines().any(|line| line == "ready"));
    }

    pub fn await_log(&self, text: &str) {
        let deadline = Instant::now() + LONG;
        while !self.log().contains(text) {
            assert!(Instant::now() < deadline, "in vain: {text}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for PID 1's end; its exit status, 128 and its number for a signal.
    pub fn wait(&mut self) -> i32 {
        let mut status = None;
        await_that("the container's end", || {
            status = self.unshare.try_wait().unwrap();
            status.is_some()
        });
        let status = status.unwrap();
        status.code().or(status.signal().map(|number| 128 + number)).unwrap()
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- stderr of the container\n{}---", self.log());
        }
        // Not only its parent: a PID 1 that has changed its uid does not die with that.
        if self.unshare.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = kill(Pid::from_raw(self.init), Signal::SIGKILL);
            let _ = self.unshare.wait();
        }
        for child in self.children.get_mut().unwrap() {
            let _ = child.wait();
        }
    }
}
