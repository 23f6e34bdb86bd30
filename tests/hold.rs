//! The hold from outside, without a mesh: the static binary in namespaces of its own. The application is a thread
//! of the test in the container's network, so that no process in the container has its sockets.
//!
//! Needs root, util-linux, iproute2 and strace: `scripts/test` has them.

use pod::{await_that, outlast};
use std::fs::{self, File};
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A PID 1 with a network of its own. Dropping it ends it.
struct Container {
    unshare: Child,
    /// PID 1, as the host numbers it.
    init: i32,
    files: tempfile::TempDir,
}

impl Container {
    /// Starts `argv`; returns when it runs. `{envoy}` is a program of that name that sleeps.
    fn start(argv: &[&str]) -> Container {
        assert!(nix::unistd::geteuid().is_root(), "namespaces want root: see scripts/test");
        let files = tempfile::tempdir().unwrap();
        let envoy = files.path().join("envoy");
        fs::copy("/bin/sleep", &envoy).unwrap();
        let stderr = File::create(files.path().join("stderr")).unwrap();
        // The marker tells the wait below from the shell that comes first.
        let unshare = Command::new("unshare")
            .args(["--net", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"])
            .args(["ip link set lo up && exec \"$@\"", "sh"])
            .args(argv.iter().map(|word| word.replace("{envoy}", envoy.to_str().unwrap())))
            .stderr(stderr)
            .spawn()
            .unwrap();
        let children = format!("/proc/{0}/task/{0}/children", unshare.id());
        let mut init = 0;
        await_that("the container's PID 1", || {
            init = fs::read_to_string(&children).unwrap().trim().parse().unwrap_or(0);
            let name = fs::read_to_string(format!("/proc/{init}/comm")).unwrap_or_default();
            !["", "unshare", "sh"].contains(&name.trim())
        });
        Container { unshare, init, files }
    }

    /// `outlast run` around an `envoy` that runs already.
    fn run(flags: &[&str]) -> Container {
        let outlast = outlast();
        let argv = [&[outlast.to_str().unwrap(), "run"], flags, &["--", "{envoy}", "1000"]].concat();
        let container = Container::start(&argv);
        await_that("COMMAND", || {
            let children = format!("/proc/{0}/task/{0}/children", container.init);
            let child = fs::read_to_string(children).unwrap_or_default();
            fs::read_to_string(format!("/proc/{}/comm", child.trim())).is_ok_and(|name| name == "envoy\n")
        });
        container
    }

    /// Does something in the container's network, in a thread.
    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let network = File::open(format!("/proc/{}/ns/net", self.init)).unwrap();
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(network, CloneFlags::CLONE_NEWNET).unwrap();
                    work()
                })
                .join()
                .unwrap()
        })
    }

    fn listen(&self, address: &str) -> TcpListener {
        self.inside(|| TcpListener::bind(address).unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.init), signal).unwrap();
    }

    /// What PID 1 and its like have written so far.
    fn log(&self) -> String {
        fs::read_to_string(self.files.path().join("stderr")).unwrap()
    }

    fn await_log(&self, text: &str) {
        await_that(text, || self.log().contains(text));
    }

    fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        await_that("the container's end", || {
            status = self.unshare.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// The hook, not yet waited for.
    fn hook(&self, flags: &[&str]) -> Child {
        self.exec(&[&[outlast().to_str().unwrap(), "prestop"], flags].concat())
    }

    fn exec(&self, argv: &[&str]) -> Child {
        Command::new("nsenter")
            .args(["--net", "--pid", "--mount", "--target", &self.init.to_string(), "--"])
            .args(argv)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- stderr of the container\n{}---", self.log());
        }
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

fn finish(hook: Child) -> (i32, String) {
    let Output { status, stderr, .. } = hook.wait_with_output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    (status.code().unwrap_or_else(|| panic!("{status}: {stderr}")), stderr)
}

fn prestop(container: &Container, flags: &[&str]) -> (i32, String) {
    finish(container.hook(flags))
}

#[test]
fn a_hook_returns_0_when_clear_and_says_how_owners_were_told() {
    let container = Container::start(&["{envoy}", "1000"]);
    let (status, log) = prestop(&container, &[]);
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("hold released reason=clear") && log.contains("proxy=\"envoy 1\""), "{log}");
}

#[test]
fn a_hook_that_reaches_the_timeout_names_the_holders_and_returns_124() {
    let container = Container::start(&["{envoy}", "1000"]);
    let listener = container.listen("0.0.0.0:8080");
    let (status, log) = prestop(&container, &["--timeout=300ms"]);
    assert_eq!(status, 124, "{log}");
    let end = log.split_once("hold released reason=timeout").unwrap_or_else(|| panic!("{log}")).1;
    assert!(end.contains("listener tcp 0.0.0.0:8080 uid 0 inode"), "{log}");
    let (status, _) = prestop(&container, &["--timeout=300ms", "--exit-zero"]);
    assert_eq!(status, 0);
    drop(listener);
    assert_eq!(prestop(&container, &["--timeout=20s"]).0, 0);
}

#[test]
fn a_hook_writes_to_the_stderr_of_the_main_process_too() {
    let container = Container::start(&["{envoy}", "1000"]);
    let (_, log) = prestop(&container, &[]);
    assert!(!log.is_empty());
    assert_eq!(container.log(), log);
}

#[test]
fn a_hook_that_shares_its_stderr_with_the_main_process_writes_once() {
    let outlast = outlast();
    let script = format!("{} prestop --timeout=300ms; true", outlast.display());
    let output = Command::new("unshare")
        .args(["--net", "--pid", "--fork", "--mount-proc", "sh", "-c", &script])
        .output()
        .unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert_eq!(log.matches("hold released").count(), 1, "{log}");
}

#[test]
fn a_hook_with_bad_settings_names_each_holds_with_the_defaults_and_returns_2() {
    let container = Container::start(&["{envoy}", "1000"]);
    let listener = container.listen("[::1]:8080");
    let hook = container.hook(&["--timeout=30", "--frobnicate", "stray", "--settle=1"]);
    container.await_log("hold started timeout=23s min_wait=0s settle=0.200s");
    container.await_log("listener tcp6 [::1]:8080");
    drop(listener);
    let (status, log) = finish(hook);
    assert_eq!(status, 2, "{log}");
    for named in ["--timeout: \"30\"", "30s", "--frobnicate", "stray", "--settle: \"1\"", "reason=clear"] {
        assert!(log.contains(named), "{named} in {log}");
    }
}

#[test]
fn a_signal_ends_the_hook_with_128_and_its_number() {
    let container = Container::start(&["{envoy}", "1000"]);
    let _listener = container.listen("0.0.0.0:8080");
    for (signal, status) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGQUIT, 131)] {
        let before = container.log().len();
        let hook = container.hook(&[]);
        await_that("the hold", || container.log()[before..].contains("0.0.0.0:8080"));
        // nsenter has forked for the PID namespace: the hook is its child.
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", hook.id())).unwrap();
        let hook_itself = Pid::from_raw(children.trim().parse().unwrap());
        // Nothing else ends it.
        for other in [Signal::SIGHUP, Signal::SIGPIPE, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGALRM] {
            kill(hook_itself, other).unwrap();
        }
        kill(hook_itself, signal).unwrap();
        let (ended, log) = finish(hook);
        assert_eq!(ended, status, "{log}");
        assert!(log.contains("hold released reason=signal"), "{log}");
    }
}

#[test]
fn without_a_proxy_there_is_nothing_to_hold_for_and_the_names_are_said() {
    let container = Container::start(&["sleep", "1000"]);
    let _listener = container.listen("0.0.0.0:8080");
    let (status, log) = prestop(&container, &["--proxy=linkerd2-proxy"]);
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("WARN") && log.contains("reason=proxy-gone"), "{log}");
    assert!(log.contains("proxy=linkerd2-proxy"), "{log}");
}

#[test]
fn a_timeout_of_0_is_no_hold() {
    let mut container = Container::run(&["--timeout=0"]);
    let _listener = container.listen("0.0.0.0:8080");
    let (status, log) = prestop(&container, &["--proxy=nothing", "--timeout=0"]);
    assert_eq!((status, log.contains("reason=off")), (0, true), "{log}");
    container.signal(Signal::SIGTERM);
    assert_eq!(container.wait().code(), Some(143));
    assert!(container.log().contains("hold released reason=off"));
}

#[test]
fn a_native_sidecar_forwards_at_once() {
    let mut container = Container::run(&["--native-sidecar"]);
    let _listener = container.listen("0.0.0.0:8080");
    container.signal(Signal::SIGTERM);
    assert_eq!(container.wait().code(), Some(143));
    assert!(container.log().contains("hold released reason=off"));
}

#[test]
fn a_hook_beside_run_steps_back_but_for_its_own_min_wait() {
    let container = Container::run(&["--settle=1s"]);
    let _listener = container.listen("0.0.0.0:8080");
    let began = Instant::now();
    let (status, log) = prestop(&container, &["--min-wait=700ms", "--settle=2s", "--timeout=20s"]);
    assert_eq!(status, 0, "{log}");
    assert!(began.elapsed() >= Duration::from_millis(700));
    assert!(log.contains("outlast run holds in this container"), "{log}");
    assert!(log.contains("flag=--timeout") && !log.contains("flag=--settle"), "{log}");
    assert!(!log.contains("hold started"), "{log}");
}

#[test]
fn min_wait_is_the_shortest_hold() {
    let mut container = Container::run(&["--min-wait=1500ms"]);
    container.signal(Signal::SIGTERM);
    container.wait();
    let log = container.log();
    let after = log.split_once("reason=clear after=").unwrap_or_else(|| panic!("{log}")).1;
    let after: f64 = after.split_once('s').unwrap().0.parse().unwrap();
    assert!(after >= 1.5, "{log}");
}

#[test]
fn a_second_sigterm_changes_nothing_and_sigint_releases() {
    let mut container = Container::run(&[]);
    let _listener = container.listen("0.0.0.0:8080");
    container.signal(Signal::SIGTERM);
    container.await_log("listener tcp 0.0.0.0:8080");
    container.signal(Signal::SIGTERM);
    container.await_log("a further SIGTERM changes nothing");
    assert!(!container.log().contains("forwarded"));
    container.signal(Signal::SIGINT);
    assert_eq!(container.wait().code(), Some(143), "the signal that started the hold is forwarded");
    let log = container.log();
    assert!(log.contains("hold released reason=signal"), "{log}");
    assert_eq!(log.matches("stop signal forwarded signal=SIGTERM").count(), 1, "{log}");
}

/// The kernel refuses one of the tables, by strace.
fn prestop_where(refusal: &str, path: &str, flags: &[&str]) -> (i32, String) {
    let container = Container::start(&["{envoy}", "1000"]);
    let outlast = outlast();
    let inject = format!("inject=open,openat:error={refusal}");
    let strace = [
        "strace",
        "-qqo",
        "/dev/null",
        "-P",
        path,
        "-e",
        &inject,
        outlast.to_str().unwrap(),
        "prestop",
        "--source=proc",
    ];
    finish(container.exec(&[&strace[..], flags].concat()))
}

#[test]
fn a_missing_v6_table_is_no_error() {
    let (status, log) = prestop_where("ENOENT", "/proc/net/tcp6", &[]);
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("reason=clear") && !log.contains("cannot look"), "{log}");
}

#[test]
fn a_table_that_cannot_be_read_holds_until_the_timeout_and_is_said_once() {
    for (refusal, path) in
        [("EACCES", "/proc/net/tcp6"), ("ENOENT", "/proc/net/tcp"), ("EMFILE", "/proc/net/tcp")]
    {
        let (status, log) = prestop_where(refusal, path, &["--timeout=700ms"]);
        assert_eq!(status, 124, "{log}");
        assert_eq!(log.matches("cannot look").count(), 1, "{log}");
        let released = log.lines().find(|line| line.contains("hold released reason=timeout")).unwrap();
        assert!(
            released.contains(path) && !released.contains("holders="),
            "not known is not none: {released}"
        );
    }
}

#[test]
fn nine_thousand_connections_and_restless_listeners_for_30_s_make_fewer_than_100_lines() {
    const PAIRS: usize = 4_500;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most.max(12_000), most.max(12_000)).unwrap();
    let mut container = Container::run(&["--timeout=30s"]);
    let (sockets, listeners) = container.inside(|| {
        let server = TcpListener::bind("127.0.0.1:8080").unwrap();
        let address = server.local_addr().unwrap();
        let pairs = (0..PAIRS).map(|_| (TcpStream::connect(address).unwrap(), server.accept().unwrap()));
        let pairs: Vec<_> = pairs.collect();
        // More listeners than are named.
        let listeners: Vec<_> =
            (10_000..10_060).map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap()).collect();
        (pairs, (server, listeners))
    });
    container.signal(Signal::SIGTERM);
    container.await_log("hold started");
    let (stop, stopped) = mpsc::channel::<()>();
    container.inside(|| {
        thread::spawn(move || {
            while stopped.recv_timeout(Duration::from_millis(50)) == Err(mpsc::RecvTimeoutError::Timeout) {
                drop(TcpListener::bind("127.0.0.1:9999").unwrap());
            }
        })
    });
    container.wait();
    drop((stop, sockets, listeners));
    let log = container.log();
    let lines = log.lines().count();
    assert!(lines < 100, "{lines} lines");
    assert!(log.contains("reason=timeout") && log.matches(" left=").count() == 20, "{log}");
    assert!(
        log.contains("still holding") && log.contains("more connections owner=application count=8990"),
        "{log}"
    );
    assert!(log.lines().all(|line| line.len() < 4096));
}

#[test]
fn json_lines_are_json_with_the_same_keys() {
    let mut container = Container::run(&["--log-format=json", "--timeout=1s"]);
    let _listener = container.listen("0.0.0.0:8080");
    container.signal(Signal::SIGTERM);
    container.wait();
    let log = container.log();
    let lines: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    let released = lines.iter().find(|line| line["message"] == "hold released").unwrap();
    assert_eq!((&released["reason"], &released["level"]), (&"timeout".into(), &"warn".into()));
    assert_eq!(released["holders"], 1);
}

fn refused(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(outlast());
    command.args(arguments).env_clear().envs(variables.iter().copied());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!((stderr.lines().count(), output.stdout.len()), (1, 0), "{stderr}");
    stderr
}

#[test]
fn bad_settings_start_nothing_and_are_named_on_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let started = directory.path().join("started");
    let command = ["--", "/usr/bin/touch", started.to_str().unwrap()];
    let line = refused(&[&["run", "--timeout=30"], &command[..]].concat(), &[]);
    assert!(line.contains("--timeout") && line.contains("\"30\"") && line.contains("30s"), "{line}");
    let line = refused(&[&["run"], &command[..]].concat(), &[("OUTLAST_TIMEOUT", "30")]);
    assert!(line.contains("OUTLAST_TIMEOUT") && line.contains("\"30\"") && line.contains("30s"), "{line}");
    refused(&["run"], &[]);
    refused(&["frobnicate"], &[]);
    refused(&[], &[]);
    assert!(!started.exists());
}

#[test]
fn help_and_version_go_to_stdout_and_survive_a_reader_that_leaves() {
    for arguments in [&["--version"][..], &["-h"], &["run", "--help"], &["prestop", "-h"]] {
        let output = Command::new(outlast()).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(output.stdout.starts_with(b"outlast ") && output.stderr.is_empty());
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let status = Command::new(outlast()).args(arguments).stdout(writer).status().unwrap();
        assert_eq!(status.code(), Some(0));
    }
}

#[test]
fn what_comes_early_is_not_lost() {
    // As PID 1: the shell that comes first blocks nothing, so the signal is sent once outlast has blocked all.
    for _ in 0..50 {
        let mut container = Container::start(&[outlast().to_str().unwrap(), "run", "--", "{envoy}", "1000"]);
        await_that("the blocked signals", || {
            let status = fs::read_to_string(format!("/proc/{}/status", container.init)).unwrap_or_default();
            status.contains("SigBlk:\tfffffff")
        });
        container.signal(Signal::SIGTERM);
        assert_eq!(container.wait().code(), Some(143));
        assert!(container.log().contains("reason=clear"), "{}", container.log());
    }
}

#[test]
fn stdout_is_commands_alone() {
    let mut command = Command::new(outlast());
    command
        .args(["run", "--log-level=debug", "--", "echo", "hello"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdout = String::new();
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    assert_eq!((stdout.as_str(), child.wait().unwrap().code()), ("hello\n", Some(0)));
}
