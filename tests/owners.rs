//! Whose socket is it, and does it hold: the rules of ownership and every state of TCP, with real processes.
//!
//! Needs root, util-linux, iproute2 and libcap: `scripts/test` has them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use nix::sys::signal::Signal;
use pod::sockets::{Family, Made, Shape, Spec, listen, listen_mptcp, listen_reuseport, make};
use pod::{AS_PROXY, Group, Programs, Space, await_that, outlast, program};
use serde_json::Value;

const AS_APPLICATION: &[&str] =
    &["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--inh-caps=-all", "env"];
/// Root in a container, where capabilities are few.
const AS_BARE_ROOT: &[&str] =
    &["setpriv", "--bounding-set=-all,+net_admin", "--inh-caps=-all", "--clear-groups"];

/// The programs of a test, and where they are.
struct Kit {
    programs: Programs,
    outlast: String,
    /// A program that holds sockets, under the proxy's name.
    envoy: String,
    /// The same under another name.
    server: String,
}

impl Kit {
    fn new() -> Kit {
        let programs = Programs::default();
        let copy = |file: &Path, name| programs.copy(file, name);
        let (outlast, sockets) = (copy(&outlast(), "outlast"), program("sockets"));
        let (envoy, server) = (copy(&sockets, "envoy"), copy(&sockets, "server"));
        Kit { programs, outlast, envoy, server }
    }

    /// PID 1 is an envoy without sockets.
    fn space(&self) -> Space {
        Space::start(&[&self.envoy])
    }

    fn hook(&self, space: &Space, who: &[&str], flags: &[&str]) -> Hook {
        Hook::start(&mut space.command(&[who, &[&self.outlast, "prestop"], flags].concat()))
    }

    fn prestop(&self, space: &Space, flags: &[&str]) -> (i32, String) {
        self.hook(space, &[], flags).finish()
    }

    /// Whether a hold would wait now.
    fn holds(&self, space: &Space, flags: &[&str]) -> bool {
        let status =
            space.command(&[&[&self.outlast, "status", "--check"], flags].concat()).output().unwrap();
        match status.status.code() {
            Some(0) => false,
            Some(3) => true,
            code => panic!("{code:?}: {}", String::from_utf8_lossy(&status.stdout)),
        }
    }

    fn sockets(&self, space: &Space, flags: &[&str]) -> Vec<Value> {
        let output = space.command(&[&[&self.outlast, "status", "--json"], flags].concat()).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        document["sockets"].as_array().unwrap().clone()
    }
}

/// A hook that runs, and what it has written.
struct Hook {
    child: Child,
    log: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Hook {
    fn start(command: &mut Command) -> Hook {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::<Mutex<String>>::default();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let lines = Arc::clone(&log);
        let reader = thread::spawn(move || {
            for line in stderr.lines() {
                let line = line.unwrap() + "\n";
                eprint!("{line}");
                lines.lock().unwrap().push_str(&line);
            }
        });
        Hook { child, log, reader }
    }

    fn await_line(&self, text: &str) {
        await_that(text, || self.log.lock().unwrap().contains(text));
    }

    fn finish(mut self) -> (i32, String) {
        let status = self.child.wait().unwrap();
        self.reader.join().unwrap();
        (status.code().unwrap(), self.log.lock().unwrap().clone())
    }
}

fn assert_clear((status, log): (i32, String)) -> String {
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("hold released reason=clear"), "{log}");
    log
}

/// Seconds that a hold took.
fn held(log: &str) -> f64 {
    let after = log.split_once("hold released reason=").unwrap().1.split_once(" after=").unwrap().1;
    after.split_once('s').unwrap().0.parse().unwrap()
}

// --- A proxy that hides its fds ---

/// `prepare` makes of the proxy's file one whose fds cannot be read. The application holds, and then nothing does.
fn hidden(who: &[&str], flags: &[&str], hook: &[&str], uid: u32, prepare: impl FnOnce(&str)) {
    let kit = Kit::new();
    prepare(&kit.envoy);
    // On no reserved port, and an idle connection: neither may be taken for the application's.
    let sockets = ["--listen=0.0.0.0:15006", "--listen=[::]:12345", "--make=Established/V4"];
    let space = Space::start(&[who, &[&kit.envoy], flags, &sockets].concat());
    let application = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    let hook = kit.hook(&space, hook, &["--grace-period=67s"]);
    hook.await_line("owners rules=uid,other proxy=\"envoy 1\"");
    hook.await_line("listener tcp 0.0.0.0:8080 uid 0");
    drop(application);
    let log = assert_clear(hook.finish());
    assert_eq!(log.matches("a proxy process hides its fds").count(), 1, "{log}");
    assert!(log.contains(&format!(
        "WARN a proxy process hides its fds pid=1 name=envoy uid={uid} so=\"sockets of its uid are taken for"
    )));
    assert!(
        log.contains("0.0.0.0:8080 uid 0 inode") && log.contains("owner=application rule=other"),
        "{log}"
    );
    assert!(log.contains("[::]:12345") && log.contains("owner=proxy rule=uid"), "{log}");
}

fn give_capability(file: &str) {
    let mut setcap = Command::new("setcap");
    setcap.args(["cap_net_bind_service=+ep", file]).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    let set = setcap.status();
    assert!(set.expect("setcap: see scripts/setup-tests").success());
}

#[test]
fn a_proxy_with_file_capabilities_is_known_by_its_uid() {
    hidden(AS_PROXY, &[], AS_PROXY, 1337, give_capability);
}

#[test]
fn a_setgid_proxy_is_known_by_its_uid() {
    hidden(AS_PROXY, &[], AS_PROXY, 1337, |file| {
        chown(file, Some(0), Some(4242)).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o2755)).unwrap();
    });
}

#[test]
fn a_proxy_whose_file_cannot_be_read_is_known_by_its_uid() {
    hidden(AS_PROXY, &[], AS_PROXY, 1337, |file| {
        fs::set_permissions(file, fs::Permissions::from_mode(0o711)).unwrap();
    });
}

#[test]
fn a_proxy_that_is_not_dumpable_is_known_by_its_uid() {
    hidden(AS_PROXY, &["--undumpable"], AS_PROXY, 1337, |_| {});
}

#[test]
fn a_proxy_of_another_uid_is_known_by_it() {
    let other = ["setpriv", "--reuid=1338", "--regid=1338", "--clear-groups", "--inh-caps=-all", "env"];
    hidden(&other, &[], AS_PROXY, 1338, |_| {});
}

#[test]
fn a_proxy_that_root_without_ptrace_cannot_read_is_known_by_its_uid() {
    hidden(AS_PROXY, &[], AS_BARE_ROOT, 1337, |_| {});
}

#[test]
fn under_run_a_command_with_file_capabilities_is_known_by_its_uid() {
    let kit = Kit::new();
    give_capability(&kit.envoy);
    let run = [kit.outlast.as_str(), "run", "--grace-period=67s", "--", &kit.envoy, "--listen=[::]:12345"];
    let mut space = Space::start(&[AS_PROXY, &run, &["--make=Established/V6"]].concat());
    let application = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    space.signal("outlast", Signal::SIGTERM);
    space.await_log("a proxy process hides its fds");
    space.await_log("listener tcp 0.0.0.0:8080 uid 0");
    drop(application);
    assert_eq!(space.wait(), 143);
    let log = space.log();
    assert!(log.contains("owners rules=uid,other") && log.contains("reason=clear"), "{log}");
}

#[test]
fn beside_a_hidden_proxy_of_root_only_listeners_hold_and_reserved_ports_are_its_own() {
    let kit = Kit::new();
    let sockets = ["--listen=0.0.0.0:15001", "--listen=[::]:15006", "--make=Established/V4"];
    let space = Space::start(&[&[kit.envoy.as_str()], &sockets[..2]].concat());
    // Who has a connection cannot be told: neither the proxy's nor the application's holds.
    let _connections = [Family::V4, Family::V6]
        .map(|family| space.inside(|| make(Spec { shape: Shape::Established, family }).unwrap()))
        .map(|made| made.held.into_iter().take(2).collect::<Vec<_>>());
    let application = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    let hook = kit.hook(&space, AS_BARE_ROOT, &["--grace-period=67s"]);
    hook.await_line("listener tcp 0.0.0.0:8080 uid 0");
    hook.await_line("owners rules=reserved-port,other");
    drop(application);
    let log = assert_clear(hook.finish());
    assert!(
        log.contains(
            "WARN a proxy process hides its fds pid=1 name=envoy uid=0 so=\"the proxy's sockets are known by the \
             reserved ports, and only listeners hold\""
        ),
        "{log}"
    );
    for port in ["0.0.0.0:15001", "[::]:15006"] {
        assert!(log.lines().any(|line| line.contains(port) && line.contains("rule=reserved-port")), "{log}");
    }
}

// --- Names, ports, uids ---

#[test]
fn ignored_ports_never_hold() {
    let kit = Kit::new();
    let space = kit.space();
    let listeners = space.inside(|| ["0.0.0.0:8080", "[::]:9042"].map(|at| TcpListener::bind(at).unwrap()));
    let connection = space.inside(|| TcpStream::connect(("::1", 9042)).unwrap());
    let port = connection.local_addr().unwrap().port();
    let ignore = format!("--ignore-port=8080,9000-9099,{port}");
    let log = assert_clear(kit.prestop(&space, &[&ignore, "--grace-period=67s"]));
    assert!(log.contains("owners rules=ignored-port"), "{log}");
    // The peer's port says nothing.
    assert!(kit.holds(&space, &["--ignore-port=8080,9000-9099"]));
    assert!(kit.holds(&space, &[&format!("--ignore-port=9000-9099,{port}")]));
    drop(listeners);
}

#[test]
fn ignored_uids_never_hold() {
    let kit = Kit::new();
    let space = kit.space();
    let server = [AS_APPLICATION, &[&kit.server, "--listen=0.0.0.0:8080", "--make=CloseWait/V6"]].concat();
    space.spawn(&server);
    let log = assert_clear(kit.prestop(&space, &["--ignore-uid=100,990-1000", "--grace-period=67s"]));
    assert!(log.contains("owners rules=ignored-uid"), "{log}");
    assert!(kit.holds(&space, &[]) && kit.holds(&space, &["--ignore-uid=100,990-999"]));
}

#[test]
fn names_are_compared_on_the_15_bytes_that_the_kernel_keeps() {
    let kit = Kit::new();
    let proxy = kit.programs.copy(program("sockets"), "consul-dataplane");
    let space = Space::start(&[&proxy, "--listen=0.0.0.0:20000", "--make=Established/V4"]);
    assert_eq!(fs::read_to_string(format!("/proc/{}/comm", space.init)).unwrap(), "consul-dataplan\n");
    let log = assert_clear(kit.prestop(&space, &["--proxy=consul-dataplane", "--grace-period=67s"]));
    assert!(log.contains("proxy=\"consul-dataplan 1\""), "{log}");
    let (_, log) = kit.prestop(&space, &["--proxy=consul-datapla", "--grace-period=67s"]);
    assert!(log.contains("reason=proxy-gone"), "{log}");
}

#[test]
fn the_wrapped_commands_own_process_is_the_proxy_whatever_its_name() {
    let kit = Kit::new();
    let run =
        [kit.outlast.as_str(), "run", "--proxy=linkerd2-proxy", "--grace-period=67s", "--", &kit.server];
    let mut space = Space::start(&[&run, &["--listen=0.0.0.0:4143", "--make=Established/V4"][..]].concat());
    let application = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    space.signal("outlast", Signal::SIGTERM);
    space.await_log("listener tcp 0.0.0.0:8080 uid 0");
    drop(application);
    assert_eq!(space.wait(), 143);
    let log = space.log();
    assert!(log.contains("reason=clear") && log.contains("proxy=\"server "), "{log}");
    assert!(log.lines().any(|line| line.contains("0.0.0.0:4143") && line.contains("owner=proxy rule=inode")));
}

// --- One PID namespace for the Pod ---

#[test]
fn in_a_shared_pid_namespace_proxies_are_told_apart_by_control_group() {
    shared_pid_namespace("a", &[]);
}

/// As container runtimes do with control groups of version 2: the sidecar sees its own group as the root.
#[test]
fn in_a_shared_pid_namespace_they_are_told_apart_in_a_control_group_namespace_too() {
    shared_pid_namespace("b", &["unshare", "--cgroup"]);
}

/// `within` is what the hook is started through.
fn shared_pid_namespace(name: &str, within: &[&str]) {
    let kit = Kit::new();
    let (sidecar, other) =
        (Group::new(&format!("{name}-sidecar")), Group::new(&format!("{name}-application")));
    let programs = &kit.programs;
    let pause = programs.copy(program("sockets"), "pause");
    let agent = programs.copy(program("sockets"), "pilot-agent");
    let space = Space::start(&[&pause]);
    let files = tempfile::tempdir().unwrap();
    // The sidecar: pilot-agent and its Envoy, with a stderr of their own.
    let stderr = files.path().join("stderr");
    let argv =
        [AS_PROXY, &[&agent, "--listen=[::]:15020", "--", &kit.envoy, "--listen=0.0.0.0:15006"]].concat();
    let mut agent = space.command(&sidecar.command(&argv));
    space.keep(agent.stderr(fs::File::create(&stderr).unwrap()).spawn().unwrap());
    fs::set_permissions(files.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&stderr, fs::Permissions::from_mode(0o666)).unwrap();
    await_that("both", || fs::read_to_string(&stderr).unwrap().matches("ready").count() == 2);
    // The application: a server and a process of it that is called envoy too.
    let argv = [AS_APPLICATION, &[&kit.server, "--", &kit.envoy, "--listen=0.0.0.0:8080"]].concat();
    space.spawn(&other.command(&argv));
    await_that("the application's envoy", || space.called("envoy").len() == 2);
    await_that("its listener", || kit.sockets(&space, &[]).iter().any(|s| s["local"] == "0.0.0.0:8080"));

    let outlast = [within, AS_PROXY, &[&kit.outlast, "prestop", "--grace-period=67s"]].concat();
    let hook = Hook::start(&mut space.command(&sidecar.command(&outlast)));
    hook.await_line("listener tcp 0.0.0.0:8080 uid 1000");
    let listeners = |log: &str, port: &str, owner: &str| {
        let mut lines = log.lines().filter(|line| line.contains("INFO listener "));
        assert!(lines.any(|line| line.contains(port) && line.contains(owner)), "{port} {owner}: {log}");
    };
    space.signal("server", Signal::SIGKILL);
    let applications =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap().contains("application");
    let envoys = space.called("envoy");
    let envoy = envoys.iter().find(|pid| applications(pid)).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(*envoy), Signal::SIGKILL).unwrap();
    let log = assert_clear(hook.finish());
    listeners(&log, "0.0.0.0:8080", "owner=application rule=other");
    listeners(&log, "0.0.0.0:15006", "owner=proxy rule=inode");
    listeners(&log, "[::]:15020", "owner=proxy rule=inode");
    // Its lines are with those of the proxy's container, and not with pause's.
    assert_eq!(fs::read_to_string(&stderr).unwrap().replace("ready\n", ""), log);
    assert_eq!(space.log(), "ready\n");
}

// --- hidepid ---

/// PID 1 is root's, and /proc shows a user their own processes only.
fn hide_pids(kit: &Kit) -> Space {
    let space = Space::start_with("mount -o remount,hidepid=2 /proc", &[&kit.server]);
    space.await_ready();
    space
}

#[test]
fn with_hidepid_the_proxy_is_seen_and_told_from_the_application() {
    let kit = Kit::new();
    let space = hide_pids(&kit);
    space.spawn(&[AS_PROXY, &[&kit.envoy, "--listen=0.0.0.0:15006"]].concat());
    let application = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    let hook = kit.hook(&space, AS_PROXY, &["--grace-period=67s"]);
    hook.await_line("listener tcp 0.0.0.0:8080 uid 0");
    drop(application);
    let log = assert_clear(hook.finish());
    assert!(log.contains("owners rules=inode,other proxy=\"envoy "), "{log}");
}

#[test]
fn with_hidepid_a_proxy_that_cannot_be_seen_is_not_taken_for_gone() {
    let kit = Kit::new();
    let space = hide_pids(&kit);
    space.spawn(&[&[kit.envoy.as_str()], &["--listen=0.0.0.0:15006"][..]].concat());
    let (status, log) = kit.hook(&space, AS_PROXY, &["--timeout=1s"]).finish();
    assert_eq!(status, 124, "{log}");
    assert!(log.contains("reason=timeout") && !log.contains("proxy-gone"), "{log}");
}

// --- What counts ---

fn row<'a>(sockets: &'a [Value], made: &Made) -> &'a Value {
    let local = made.local.to_string();
    let remote = made.remote.map(|remote| remote.to_string());
    let wanted = |socket: &&Value| {
        socket["local"] == local.as_str()
            && remote.as_deref().map_or(socket["state"] == "listen", |remote| socket["remote"] == remote)
    };
    let mut rows = sockets.iter().filter(wanted);
    let row = rows.next().unwrap_or_else(|| panic!("{made:?} is not there: {sockets:#?}"));
    assert!(rows.next().is_none());
    row
}

#[test]
fn every_state_counts_as_what_it_is() {
    use Shape::{
        CloseWait, Closing, Established, FinWait1, FinWait2, LastAck, Listener, OrphanFinWait1,
        OrphanFinWait2, OrphanLastAck, SynRecv, SynSent, TimeWait, Unaccepted,
    };
    let kit = Kit::new();
    // What no process has is looked at by itself.
    let (lost, kept): (Vec<_>, Vec<_>) =
        Shape::ALL.into_iter().partition(|shape| format!("{shape:?}").starts_with("Orphan"));
    for (space, shapes) in [(kit.space(), kept), (kit.space(), lost)] {
        let specs = shapes.into_iter().flat_map(|shape| Family::ALL.map(|family| Spec { shape, family }));
        let specs: Vec<_> = specs.collect();
        let made = space.inside(|| specs.iter().map(|spec| make(*spec).unwrap()).collect::<Vec<_>>());
        for source in ["--source=proc", "--source=diag"] {
            let sockets = kit.sockets(&space, &[source]);
            for (spec, made) in specs.iter().zip(&made) {
                let (state, has_inode, holds) = match spec.shape {
                    Listener => ("listen", true, Some("listener")),
                    Established => ("established", true, Some("connection")),
                    SynSent => ("syn-sent", true, Some("connection")),
                    FinWait1 => ("fin-wait-1", true, Some("connection")),
                    FinWait2 => ("fin-wait-2", true, Some("connection")),
                    Closing => ("closing", true, Some("connection")),
                    CloseWait => ("close-wait", true, Some("connection")),
                    LastAck => ("last-ack", true, Some("connection")),
                    Unaccepted => ("established", false, None),
                    SynRecv => ("syn-recv", false, None),
                    TimeWait => ("time-wait", false, None),
                    OrphanFinWait2 => ("fin-wait-2", false, None),
                    OrphanFinWait1 => ("fin-wait-1", false, Some("undelivered")),
                    OrphanLastAck => ("last-ack", false, Some("undelivered")),
                };
                let row = row(&sockets, made);
                assert_eq!(row["state"], state, "{spec:?} {row}");
                assert_eq!(row["inode"] != 0, has_inode, "{spec:?} {row}");
                let (owner, rule) = if has_inode { ("application", "other") } else { ("nobody", "no-inode") };
                assert_eq!((&row["owner"], &row["rule"]), (&owner.into(), &rule.into()), "{spec:?} {row}");
                assert_eq!(row["holds"].as_str(), holds, "{spec:?} {row}");
                let protocol = if spec.family == Family::V4 { "tcp" } else { "tcp6" };
                assert_eq!(row["protocol"], protocol, "{spec:?} {row}");
            }
        }
    }
}

/// Sockets whose peers and listeners are ignored; the flag for that.
fn alone(space: &Space, shape: Shape) -> (Vec<Made>, String) {
    let all = || Family::ALL.map(|family| make(Spec { shape, family }).unwrap());
    let made: Vec<Made> = space.inside(all).into();
    let ports: Vec<_> = made.iter().map(|one| one.remote.unwrap().port().to_string()).collect();
    (made, format!("--ignore-port={}", ports.join(",")))
}

#[test]
fn orphans_and_time_wait_never_hold() {
    let kit = Kit::new();
    let space = kit.space();
    for shape in [Shape::OrphanFinWait2, Shape::TimeWait] {
        let (_made, ignore) = alone(&space, shape);
        let log = assert_clear(kit.prestop(&space, &[&ignore, "--grace-period=67s"]));
        assert!(held(&log) < 5.0, "{log}");
    }
}

#[test]
fn half_closed_connections_hold_while_a_process_has_them() {
    let kit = Kit::new();
    let space = kit.space();
    for shape in [Shape::FinWait2, Shape::CloseWait] {
        let (made, ignore) = alone(&space, shape);
        assert!(kit.holds(&space, &[&ignore]));
        drop(made);
        // A process that another thread forks has them until its exec.
        await_that("the end of both ends", || !kit.holds(&space, &[&ignore]));
    }
}

/// Bytes hold, and stop doing so when nothing has moved for 5 s.
fn assert_stalls(kit: &Kit, space: &Space, ignore: &str) {
    assert!(kit.holds(space, &[ignore]));
    let log = assert_clear(kit.prestop(space, &[ignore, "--grace-period=67s"]));
    assert!((5.0..30.0).contains(&held(&log)), "{log}");
    assert!(log.contains("holds=undelivered"), "{log}");
}

#[test]
fn bytes_that_an_orphan_cannot_deliver_hold_for_5_s() {
    let kit = Kit::new();
    let space = kit.space();
    let (_made, ignore) = alone(&space, Shape::OrphanFinWait1);
    assert_stalls(&kit, &space, &ignore);
}

#[test]
fn bytes_before_a_window_of_zero_hold_for_5_s() {
    let kit = Kit::new();
    let space = kit.space();
    let _peer = space.inside(|| listen("127.0.0.1:9000".parse().unwrap(), 16).unwrap());
    space.spawn(&[&kit.envoy, "--stuff=127.0.0.1:9000"]);
    assert_stalls(&kit, &space, "--ignore-port=9000");
}

#[test]
fn a_connection_attempt_to_a_vanished_peer_holds_for_5_s() {
    let kit = Kit::new();
    let space = kit.space();
    space.spawn(&[&kit.envoy, "--make=SynSent/V4"]);
    assert_stalls(&kit, &space, "--ignore-port=1");
}

#[test]
fn mptcp_listeners_have_their_owners() {
    let kit = Kit::new();
    let space = Space::start(&[&kit.envoy, "--mptcp=0.0.0.0:15006"]);
    let connect = || {
        let listener = listen_mptcp("[::]:8080".parse().unwrap()).unwrap();
        let client = TcpStream::connect("127.0.0.1:8080").unwrap();
        (listener.accept().unwrap(), client, listener)
    };
    let (accepted, client, listener) = space.inside(connect);
    for source in ["--source=proc", "--source=diag"] {
        let sockets = kit.sockets(&space, &[source]);
        let of = |local: &str| sockets.iter().find(|s| s["local"] == local).unwrap().clone();
        assert_eq!(
            (&of("0.0.0.0:15006")["owner"], &of("0.0.0.0:15006")["holds"]),
            (&"proxy".into(), &Value::Null)
        );
        assert_eq!(of("[::]:8080")["holds"], "listener");
    }
    let port = client.local_addr().unwrap().port();
    let ignore = format!("--ignore-port={port}");
    let hook = kit.hook(&space, &[], &[&ignore, "--grace-period=67s"]);
    hook.await_line("listener tcp6 [::]:8080");
    drop(listener);
    hook.await_line("listeners changed");
    assert!(kit.holds(&space, &[&ignore]), "the accepted connection");
    drop(accepted);
    assert_clear(hook.finish());
}

#[test]
fn each_of_the_listeners_that_share_a_port_holds() {
    let kit = Kit::new();
    let space = kit.space();
    let address = "0.0.0.0:8080".parse().unwrap();
    let [one, other] = space.inside(|| [(); 2].map(|()| listen_reuseport(address).unwrap()));
    let hook = kit.hook(&space, &[], &["--grace-period=67s"]);
    hook.await_line("sockets=2");
    drop(one);
    assert!(kit.holds(&space, &[]));
    drop(other);
    assert_clear(hook.finish());
}

#[test]
fn a_listener_that_a_forked_worker_inherited_holds_until_the_worker_ends() {
    let kit = Kit::new();
    let space = kit.space();
    let listener = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    let mut worker = Command::new("sleep").arg("1000").stdin(OwnedFd::from(listener)).spawn().unwrap();
    let hook = kit.hook(&space, &[], &["--grace-period=67s"]);
    hook.await_line("listener tcp 0.0.0.0:8080");
    assert!(kit.holds(&space, &[]));
    worker.kill().unwrap();
    assert_clear(hook.finish());
    worker.wait().unwrap();
}

#[test]
fn what_was_accepted_holds_after_its_listener_has_closed() {
    let kit = Kit::new();
    let space = kit.space();
    let listener = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    let client = space.inside(|| TcpStream::connect("127.0.0.1:8080").unwrap());
    let accepted = listener.accept().unwrap();
    let ignore = format!("--ignore-port={}", client.local_addr().unwrap().port());
    let hook = kit.hook(&space, &[], &[&ignore, "--grace-period=67s"]);
    hook.await_line("listener tcp 0.0.0.0:8080");
    drop(listener);
    hook.await_line("listeners changed");
    assert!(kit.holds(&space, &[&ignore]));
    drop(accepted);
    let log = assert_clear(hook.finish());
    assert!(log.contains("last_holder=\"connection tcp 127.0.0.1:8080"), "{log}");
}
