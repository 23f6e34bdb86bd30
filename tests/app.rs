//! The presence listener of `outlast app`, and COMMAND as its child: with a hook, with the old loop, and with a real
//! Envoy.
//!
//! Needs root, Envoy, util-linux, iproute2, net-tools and the static binary: `scripts/test` has them.

use pod::outlast;
use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pod::{Builder, Pod, Programs, Space, Status, StopPlan, StopReport, await_that, program};

const GRACE: Duration = Duration::from_secs(60);
/// The proxy is not waited for.
const AT_ONCE: [&str; 3] = ["app", "--ready-timeout=0", "--on-timeout=continue"];

/// The sidecar's container: PID 1 is an envoy without sockets.
fn sidecar() -> (Space, Programs) {
    sidecar_with("")
}

fn sidecar_with(setup: &str) -> (Space, Programs) {
    let programs = Programs::default();
    let envoy = programs.copy(program("sockets"), "envoy");
    let space = Space::start_with(setup, &[&envoy]);
    space.await_ready();
    (space, programs)
}

/// `outlast app` in the Pod's network; the sidecar does not see its processes. Dropping it ends it and COMMAND.
struct App {
    child: Child,
    files: tempfile::TempDir,
}

impl App {
    fn start(space: &Space, flags: &[&str], command: &[&str]) -> App {
        let files = tempfile::tempdir().unwrap();
        let stderr = fs::File::create(files.path().join("stderr")).unwrap();
        let mut app = Command::new(outlast());
        app.args(AT_ONCE).args(flags).arg("--").args(command).stdin(Stdio::null()).stderr(stderr);
        let app = App { child: space.inside(|| app.spawn().unwrap()), files };
        let name = Path::new(command[0]).file_name().unwrap().to_str().unwrap().to_owned() + "\n";
        await_that("COMMAND", || {
            app.command()
                .is_some_and(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c == name))
        });
        app
    }

    /// COMMAND's process.
    fn command(&self) -> Option<i32> {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.child.id())).ok()?;
        children.trim().parse().ok()
    }

    fn signal_command(&self, signal: Signal) {
        kill(Pid::from_raw(self.command().unwrap()), signal).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    fn wait(&mut self) -> i32 {
        let status = self.child.wait().unwrap();
        status.code().unwrap_or_else(|| panic!("{status}"))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.files.path().join("stderr")).unwrap()
    }
}

impl Drop for App {
    fn drop(&mut self) {
        if let (Ok(None), Some(command)) = (self.child.try_wait(), self.command()) {
            let _ = kill(Pid::from_raw(command), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Local addresses of the listeners in the Pod, with their longest backlog.
fn listeners(space: &Space) -> Vec<(String, String)> {
    let ss = space.command(&["ss", "-Htln"]).output().unwrap();
    let lines = String::from_utf8(ss.stdout).unwrap();
    let cells = lines.lines().map(|line| line.split_whitespace().map(String::from).collect::<Vec<_>>());
    cells.map(|cells| (cells[3].clone(), cells[2].clone())).collect()
}

fn listens(space: &Space, address: &str) -> bool {
    listeners(space).iter().any(|(local, _)| local == address)
}

/// The exit status of `outlast status --check` in the sidecar.
fn check(space: &Space) -> Option<i32> {
    let outlast = outlast();
    let mut command = space.command(&[outlast.to_str().unwrap(), "status", "--check"]);
    command.stdout(Stdio::null()).status().unwrap().code()
}

/// Sockets of a process.
fn sockets_of(pid: i32) -> Vec<String> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = fds.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    links.filter_map(|link| link.to_str().map(String::from)).filter(|l| l.starts_with("socket:")).collect()
}

// --- The presence listener ---

#[test]
fn it_is_on_the_first_free_port_and_accepts_no_one() {
    let (space, _programs) = sidecar();
    let _taken = space.inside(|| [15900, 15901].map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap()));
    let _app = App::start(&space, &[], &["sleep", "1000"]);
    assert!(listeners(&space).contains(&("127.0.0.1:15902".into(), "0".into())), "{:?}", listeners(&space));
}

#[test]
fn it_is_on_the_v6_loopback_where_there_is_no_v4() {
    let (space, _programs) = sidecar_with("ip addr del 127.0.0.1/8 dev lo");
    let _app = App::start(&space, &[], &["sleep", "1000"]);
    assert!(listeners(&space).contains(&("[::1]:15900".into(), "0".into())), "{:?}", listeners(&space));
    assert_eq!(check(&space), Some(3));
}

#[test]
fn command_does_not_inherit_it() {
    let (space, _programs) = sidecar();
    let app = App::start(&space, &[], &["sleep", "1000"]);
    assert!(listens(&space, "127.0.0.1:15900"));
    let inode = fs::read_to_string(format!("/proc/{}/net/tcp", space.init)).unwrap();
    // 15900 in hexadecimal; the inode is the tenth field.
    let inode =
        inode.lines().find(|line| line.contains(":3E1C ")).unwrap().split_whitespace().nth(9).unwrap();
    let inode = format!("socket:[{inode}]");
    assert!(sockets_of(app.child.id().cast_signed()).contains(&inode));
    assert!(!sockets_of(app.command().unwrap()).contains(&inode));
}

#[test]
fn it_closes_when_command_is_gone_and_not_when_the_proxy_is() {
    let (space, _programs) = sidecar();
    let agent = space.inside(|| TcpListener::bind("127.0.0.1:15020").unwrap());
    agent.set_nonblocking(true).unwrap();
    let mut app = App::start(&space, &["--quit=always"], &["sleep", "1000"]);
    assert!(listens(&space, "127.0.0.1:15900"));
    app.signal_command(Signal::SIGKILL);
    await_that("the request to quit", || agent.accept().is_ok());
    let refused = space.inside(|| TcpStream::connect("127.0.0.1:15900")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    drop(agent);
    assert_eq!(app.wait(), 137);
}

#[test]
fn it_can_be_left_out() {
    let (space, _programs) = sidecar();
    let _app = App::start(&space, &["--presence=false"], &["sleep", "1000"]);
    assert_eq!(listeners(&space), []);
    assert_eq!(check(&space), Some(0));
}

#[test]
fn where_all_ports_are_taken_command_runs_all_the_same_and_a_warning_says_so() {
    let (space, _programs) = sidecar();
    let ips = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let all = ips.into_iter().flat_map(|ip| (15900..=15999).map(move |port| SocketAddr::new(ip, port)));
    let taken: Vec<_> = space.inside(|| all.map(|address| TcpListener::bind(address).unwrap()).collect());
    let app = App::start(&space, &[], &["sleep", "1000"]);
    assert_eq!(listeners(&space).len(), taken.len());
    assert!(app.log().contains("WARN no presence listener: a hold does not wait for a silent COMMAND"));
}

#[test]
fn a_hook_waits_for_a_silent_command_and_no_longer() {
    let (space, _programs) = sidecar();
    let outlast = outlast();
    let mut app = App::start(&space, &[], &["sleep", "1000"]);
    let mut hook =
        space.command(&[outlast.to_str().unwrap(), "prestop", "--grace-period=67s"]).spawn().unwrap();
    space.await_log("listener tcp 127.0.0.1:15900");
    app.signal(Signal::SIGTERM);
    assert_eq!(app.wait(), 143);
    assert_eq!(hook.wait().unwrap().code(), Some(0));
    assert!(space.log().contains("hold released reason=clear"), "{}", space.log());
}

#[test]
fn the_old_netstat_loop_waits_for_a_silent_command_too() {
    const LOOP: &str = "while [ $(netstat -plunt | grep tcp | egrep -v 'envoy|pilot-agent' | wc -l | xargs) -ne 0 ]; \
                        do echo waiting >&2; sleep 1; done 2>>\"$0\"; echo over >>\"$0\"";
    let (space, programs) = sidecar();
    let said = |name: &str| fs::read_to_string(programs.path().join(name)).unwrap_or_default();
    let spawn = |name: &str| {
        let file = programs.path().join(name);
        space.keep(space.command(&["sh", "-c", LOOP, file.to_str().unwrap()]).spawn().unwrap());
    };
    let app = App::start(&space, &[], &["sleep", "1000"]);
    spawn("with");
    await_that("the loop's second look", || said("with").matches("waiting").count() == 2);
    assert!(!said("with").contains("over"));
    app.signal_command(Signal::SIGTERM);
    await_that("the loop's end", || said("with").contains("over"));
    // It does not see a command that is silent by itself.
    let _silent = App::start(&space, &["--presence=false"], &["sleep", "1000"]);
    spawn("without");
    await_that("the loop's end", || said("without").contains("over"));
    assert!(!said("without").contains("waiting"));
}

// --- COMMAND ---

fn app_as_init(command: &[&str]) -> Space {
    let outlast = outlast();
    Space::start(&[&[outlast.to_str().unwrap()], &AT_ONCE[..], &["--"], command].concat())
}

#[test]
fn stop_signals_reach_command_at_once_and_its_status_is_outlasts() {
    for (signal, status) in [(Signal::SIGTERM, 5), (Signal::SIGINT, 6), (Signal::SIGUSR1, 7)] {
        let traps = "trap 'exit 5' TERM; trap 'exit 6' INT; trap 'exit 7' USR1; echo ready >&2; while :; do sleep 0.1; done";
        let mut space = app_as_init(&["sh", "-c", traps]);
        // Without a hold, whatever listens.
        let _listener = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
        kill(Pid::from_raw(space.init), signal).unwrap();
        assert_eq!(space.wait(), status);
        assert!(!space.log().contains("hold started"));
    }
}

#[test]
fn statuses_are_those_of_run() {
    let programs = Programs::default();
    let plain = programs.path().join("plain");
    fs::write(&plain, "not a program").unwrap();
    let cases: [(&[&str], i32); 5] = [
        (&["true"], 0),
        (&["sh", "-c", "exit 7"], 7),
        (&["sh", "-c", "kill -KILL $$"], 137),
        (&["/nonexistent"], 127),
        (&[plain.to_str().unwrap()], 126),
    ];
    for (command, status) in cases {
        let mut app = Command::new(outlast());
        app.args(AT_ONCE).arg("--").args(command).stderr(Stdio::null());
        assert_eq!(app.status().unwrap().code(), Some(status), "{command:?}");
    }
}

#[test]
fn orphans_are_reaped() {
    let orphans = "for i in 1 2 3; do (sleep 0.1 &); done; echo ready >&2; exec tail -f /dev/null";
    let space = app_as_init(&["sh", "-c", orphans]);
    // A zombie keeps its name.
    await_that("the end of all orphans", || space.called("sleep").is_empty());
    assert_eq!(space.called("tail").len(), 1);
}

// --- In a Pod with a real Envoy ---

/// A worker that after SIGTERM closes everything, works for 6 s without a socket, and makes one call.
fn silent_worker() -> Builder {
    Pod::builder()
        .program(outlast(), "outlast")
        // Nothing but the hold shall keep the proxy.
        .env("TERMINATION_DRAIN_DURATION_SECONDS", "1")
        .env("OUTLAST_GRACE_PERIOD", "60s")
        .application(&[
            "--worker",
            "10.9.0.1:9000",
            "--silent",
            "6s",
            "--last-call",
            "http://10.9.0.1:9000/last",
        ])
}

fn through_run(builder: Builder) -> (Builder, StopPlan) {
    (builder.sidecar(&["outlast", "run", "--", "pilot-agent", "proxy", "sidecar"]), StopPlan::new(GRACE))
}

fn through_prestop(builder: Builder) -> (Builder, StopPlan) {
    (builder, StopPlan::new(GRACE).hook(&["outlast", "prestop"]))
}

/// Stops it; what was called, and how it went.
fn stop((builder, plan): (Builder, StopPlan)) -> (Vec<String>, StopReport, String) {
    let pod = builder.start_unready().unwrap();
    let upstream = pod.upstream(9000).unwrap();
    pod.await_ready().unwrap();
    await_that("the first call", || !upstream.calls().is_empty());
    let report = pod.stop(&plan);
    (upstream.calls().into_iter().map(|(_, path)| path).collect(), report, pod.log().text())
}

fn assert_made((calls, report, log): (Vec<String>, StopReport, String)) {
    assert_eq!(calls, ["/first", "/last"], "{log}");
    assert_eq!(report.application.as_ref().unwrap().exit.status, Status::Code(0), "{log}");
    assert_eq!(report.sidecar.exit.status, Status::Code(0), "{log}");
    assert!(report.outlived().unwrap() > 0.0 && log.contains("reason=clear"), "{log}");
}

fn assert_lost((calls, report, log): (Vec<String>, StopReport, String)) {
    assert_eq!(calls, ["/first"], "{log}");
    assert_eq!(report.application.as_ref().unwrap().exit.status, Status::Code(1), "{log}");
    assert!(report.outlived().unwrap() < 0.0, "{log}");
}

#[test]
fn a_silent_worker_under_app_makes_its_last_call_through_run() {
    let worker = silent_worker().wrap_application(outlast(), "outlast", &["outlast", "app", "--"]);
    assert_made(stop(through_run(worker)));
}

#[test]
fn a_silent_worker_under_app_makes_its_last_call_through_prestop() {
    let worker = silent_worker().wrap_application(outlast(), "outlast", &["outlast", "app", "--"]);
    assert_made(stop(through_prestop(worker)));
}

#[test]
fn a_silent_worker_without_app_loses_its_last_call_through_run() {
    assert_lost(stop(through_run(silent_worker())));
}

#[test]
fn a_silent_worker_without_app_loses_its_last_call_through_prestop() {
    assert_lost(stop(through_prestop(silent_worker())));
}
