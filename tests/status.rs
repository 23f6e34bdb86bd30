//! `outlast status` from outside: against ss and netstat, and in a Pod with a real Envoy.
//!
//! Needs root, Envoy, iproute2, net-tools, strace and the static binary: `scripts/test` has them.

use pod::outlast;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;
use pod::sockets::{Family, Shape, Spec, make};
use pod::{Pod, Programs, Space, Status, await_that, program};
use serde_json::Value;

/// Only a failure takes so long.
const LONG: Duration = Duration::from_secs(60);

fn output(space: &Space, argv: &[&str]) -> (i32, String) {
    let output = space.command(argv).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.is_empty() || stderr.starts_with("strace: "), "{argv:?}: {stderr}");
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

// --- Against ss and netstat ---

/// One socket, as both programs show it. Its holders are `pid/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    local: String,
    remote: String,
    state: String,
    send_queue: u32,
    receive_queue: u32,
    uid: u32,
    inode: u64,
}

type Rows = BTreeMap<Row, BTreeSet<String>>;

/// The rows of `outlast status`, each with the one process that it names.
fn rows_of_status(text: &str) -> Rows {
    let mut lines: Vec<&str> = text.lines().collect();
    let conclusion = lines.pop().unwrap();
    assert!(conclusion.starts_with("A hold would "), "{conclusion}");
    let header = lines.remove(0);
    let names: Vec<_> = header.split_whitespace().collect();
    let starts: Vec<_> =
        names.iter().map(|name| header.find(&format!("{name} ")).or(header.find(name))).collect();
    let mut rows = Rows::new();
    for line in lines {
        // The columns are aligned: each cell begins below its heading, after two spaces.
        let cells: Vec<_> = line.split_whitespace().collect();
        assert_eq!(cells.len(), names.len(), "{line}");
        for (cell, start) in cells.iter().zip(&starts) {
            assert!(line[start.unwrap()..].starts_with(cell), "{cell} in\n{header}\n{line}");
        }
        let cell = |name: &str| cells[names.iter().position(|known| *known == name).unwrap()];
        let number = |name: &str| cell(name).parse().unwrap();
        let row = Row {
            local: cell("LOCAL").into(),
            remote: cell("REMOTE").into(),
            state: cell("STATE").into(),
            // Of a listener, sock_diag tells the longest backlog here, and /proc 0.
            send_queue: if cell("STATE") == "listen" { 0 } else { number("SEND-Q") },
            receive_queue: number("RECV-Q"),
            // That of the listener in /proc, and 0 from sock_diag: there is no socket yet.
            uid: if cell("STATE") == "syn-recv" { 0 } else { number("UID") },
            inode: cell("INODE").parse().unwrap(),
        };
        assert_eq!(cell("PROTO"), if row.local.starts_with('[') { "tcp6" } else { "tcp" });
        let holder = Some(cell("PROCESS")).filter(|process| *process != "-").map(String::from);
        assert!(rows.insert(row, holder.into_iter().collect()).is_none(), "{line}");
    }
    rows
}

/// The same of `ss -Htanpe`.
fn rows_of_ss(text: &str) -> Rows {
    let state = |name: &str| match name {
        "ESTAB" => "established".into(),
        "UNCONN" => "close".into(),
        "FIN-WAIT-1" | "FIN-WAIT-2" | "SYN-SENT" | "SYN-RECV" | "TIME-WAIT" | "CLOSE-WAIT" | "LAST-ACK"
        | "LISTEN" | "CLOSING" => name.to_lowercase(),
        _ => panic!("{name}"),
    };
    // A dual-stack wildcard is an asterisk there.
    let address = |text: &str| text.replace("*:", "[::]:").replace(":[::]:", ":0").replace(":*", ":0");
    let row = |line: &str| {
        let cells: Vec<_> = line.split_whitespace().collect();
        let field = |name: &str| cells.iter().find_map(|cell| cell.strip_prefix(name)).unwrap_or("0");
        let state: String = state(cells[0]);
        let row = Row {
            local: address(cells[3]),
            remote: address(cells[4]),
            send_queue: if state == "listen" { 0 } else { cells[2].parse().unwrap() },
            receive_queue: cells[1].parse().unwrap(),
            uid: field("uid:").parse().unwrap(),
            inode: field("ino:").parse().unwrap(),
            state,
        };
        // users:(("envoy",pid=7,fd=3),("envoy",pid=8,fd=3))
        let users = field("users:").split("(\"").filter_map(|user| {
            let (name, rest) = user.split_once("\",pid=")?;
            Some(format!("{}/{name}", rest.split_once(',')?.0))
        });
        (row, users.collect())
    };
    text.lines().map(row).collect()
}

/// Listeners as `netstat -plntW` shows them: address, backlog in use and process.
fn listeners_of_netstat(text: &str) -> BTreeSet<(String, u32, String)> {
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows = rows.filter(|cells| cells.first().is_some_and(|cell| cell.starts_with("tcp")));
    rows.map(|cells| {
        let (ip, port) = cells[3].rsplit_once(':').unwrap();
        let local = if cells[0] == "tcp6" { format!("[{ip}]:{port}") } else { cells[3].to_string() };
        // netstat takes the name from the command line, and only its last part.
        (local, cells[1].parse().unwrap(), cells[6].to_string())
    })
    .collect()
}

/// `SplitMix64`: the same numbers for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) >> 1).unwrap() % end
    }
}

#[test]
fn agrees_row_by_row_with_ss_and_netstat_on_50_random_sockets() {
    let seed = std::env::var("SEED").map_or_else(
        |_| {
            u64::from(std::process::id()) << 32
                | u64::from(SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos())
        },
        |seed| seed.parse().unwrap(),
    );
    eprintln!("SEED={seed}");
    let mut random = Random(seed);
    // Each shape at least once, and 50 in all; by the proxy, by a visible process of another user, and by none.
    let mut makers: [Vec<Spec>; 3] = Default::default();
    for index in 0..50 {
        let shape =
            Shape::ALL.get(index).copied().unwrap_or_else(|| Shape::ALL[random.below(Shape::ALL.len())]);
        makers[random.below(3)].push(Spec { shape, family: Family::ALL[random.below(3)] });
    }
    let programs = Programs::default();
    let [envoy, server] = ["envoy", "server"].map(|name| programs.copy(program("sockets"), name));
    let outlast = programs.copy(outlast(), "outlast");
    let flags = |specs: &[Spec]| {
        specs.iter().map(|spec| format!("--make={:?}/{:?}", spec.shape, spec.family)).collect::<Vec<_>>()
    };
    let [of_envoy, of_server, hidden] = makers;
    let of_envoy = flags(&of_envoy);
    let of_envoy: Vec<_> = std::iter::once(&envoy).chain(&of_envoy).map(String::as_str).collect();
    let space = Space::start(&of_envoy);
    let of_server = flags(&of_server);
    let as_user =
        ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--inh-caps=-all"].map(String::from);
    let of_server: Vec<_> = as_user.iter().chain([&server]).chain(&of_server).map(String::as_str).collect();
    space.spawn(&of_server);
    let _hidden = space.inside(|| hidden.iter().map(|spec| make(*spec).unwrap()).collect::<Vec<_>>());

    for source in ["--source=diag", "--source=proc"] {
        // What is not acknowledged yet, or is tried again, may move: compared is what ss shows twice.
        let ss = || rows_of_ss(&output(&space, &["ss", "-Htanpe"]).1);
        let (mut before, mut status, mut text) = (ss(), Rows::new(), String::new());
        await_that("ss that shows the same twice", || {
            text = output(&space, &[&outlast, "status", source]).1;
            status = rows_of_status(&text);
            let after = ss();
            let same = before == after;
            before = after;
            same
        });
        assert!(status.len() >= 50, "only {} rows", status.len());
        let rows = |rows: &Rows| rows.keys().cloned().collect::<BTreeSet<_>>();
        let difference = &rows(&status) ^ &rows(&before);
        assert!(difference.is_empty(), "{source}, SEED={seed}: {difference:#?}\n{text}");
        for (row, holder) in &status {
            let users = &before[row];
            assert_eq!(holder.len(), users.len().min(1), "{row:?} {users:?}");
            assert!(holder.is_subset(users), "{row:?} {holder:?} {users:?}");
        }
        let netstat = listeners_of_netstat(&output(&space, &["netstat", "-plntW"]).1);
        let listeners = status.iter().filter(|(row, _)| row.state == "listen").map(|(row, holder)| {
            let holder = holder.first().map_or("-".to_string(), |holder| {
                let (pid, name) = holder.split_once('/').unwrap();
                format!("{pid}/{name}")
            });
            (row.local.clone(), row.receive_queue, holder)
        });
        assert_eq!(listeners.collect::<BTreeSet<_>>(), netstat, "{source}, SEED={seed}\n{text}");
        let names: BTreeSet<_> = status.keys().map(|row| row.state.as_str()).collect();
        assert_eq!(names.len(), 10, "{names:?}");
    }
}

// --- In a Pod ---

/// As much of JSON Schema as docs/status.schema.json uses; an unknown keyword fails.
fn validate(value: &Value, schema: &Value, place: &str) {
    for (keyword, rule) in schema.as_object().unwrap() {
        match keyword.as_str() {
            "$schema" | "title" | "description" => {}
            "type" => {
                let is = |name: &Value| match name.as_str().unwrap() {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "integer" => value.is_i64() || value.is_u64(),
                    "null" => value.is_null(),
                    other => panic!("{other}"),
                };
                let names = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                assert!(names.iter().any(is), "{place}: {value} is no {rule}");
            }
            "enum" => assert!(rule.as_array().unwrap().contains(value), "{place}: {value} is not of {rule}"),
            "minimum" => assert!(value.as_f64().unwrap() >= rule.as_f64().unwrap(), "{place}: {value}"),
            "required" => {
                for key in rule.as_array().unwrap() {
                    assert!(value.get(key.as_str().unwrap()).is_some(), "{place}: no {key}");
                }
            }
            "additionalProperties" => {
                assert_eq!(*rule, Value::Bool(false));
                for key in value.as_object().unwrap().keys() {
                    assert!(schema["properties"].get(key).is_some(), "{place}: {key} is not described");
                }
            }
            "properties" => {
                for (key, schema) in rule.as_object().unwrap() {
                    validate(&value[key], schema, &format!("{place}.{key}"));
                }
            }
            "items" => {
                for (index, item) in value.as_array().unwrap().iter().enumerate() {
                    validate(item, rule, &format!("{place}[{index}]"));
                }
            }
            other => panic!("{other}"),
        }
    }
}

fn validated(text: &str) -> Value {
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/status.schema.json");
    let document = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    validate(&document, &serde_json::from_str(&fs::read_to_string(schema).unwrap()).unwrap(), "$");
    document
}

/// `outlast status` in the sidecar: its exit status and what it prints.
fn status_in_pod(pod: &Pod, flags: &[&str]) -> (Status, String) {
    let before = pod.log().lines().len();
    let status = pod.exec(&[&["outlast", "status"], flags].concat(), "status").unwrap().wait(LONG).unwrap();
    let lines = pod.log().lines().split_off(before);
    // The fixture adds a line of its own about the end.
    let lines = lines.into_iter().filter(|line| line.source == "status" && !line.text.starts_with('('));
    (status.status, lines.map(|line| line.text + "\n").collect())
}

#[test]
fn names_the_listeners_of_envoy_of_pilot_agent_and_of_the_application() {
    let pod = Pod::builder()
        .program(outlast(), "outlast")
        .application(&["--listen", "0.0.0.0:8080", "--listen", "[::]:8081"])
        .start()
        .unwrap();
    let (status, text) = status_in_pod(&pod, &["--json"]);
    assert_eq!(status, Status::Code(0));
    let document = validated(&text);
    let mut listeners = BTreeSet::new();
    for socket in document["sockets"].as_array().unwrap().iter().filter(|s| s["state"] == "listen") {
        let word = |key: &str| socket[key].as_str().unwrap_or("-").to_string();
        listeners.insert(["local", "process", "owner", "rule", "holds"].map(word));
    }
    let envoy = |local: &str| [local, "envoy", "proxy", "inode", "-"].map(String::from);
    let agent = |local: &str| [local, "pilot-agent", "proxy", "inode", "-"].map(String::from);
    let application = |local: &str| [local, "-", "application", "other", "listener"].map(String::from);
    let mut expected = BTreeSet::from([
        envoy("127.0.0.1:15000"),
        agent("127.0.0.1:15004"),
        agent("[::]:15020"),
        application("0.0.0.0:8080"),
        application("[::]:8081"),
    ]);
    for port in [15001, 15006, 15021, 15090] {
        expected.extend([envoy(&format!("0.0.0.0:{port}")), envoy(&format!("[::]:{port}"))]);
    }
    assert_eq!(listeners, expected);
    assert_eq!((&document["listeners"], &document["verdict"]), (&2.into(), &"held".into()));
    assert_eq!(document["error"], Value::Null);

    // And --check, when the application ends.
    let (status, text) = status_in_pod(&pod, &["--check"]);
    assert_eq!(status, Status::Code(3), "{text}");
    assert!(text.contains("\nA hold would wait: listeners 2, connections 0, undelivered 0.\n"), "{text}");
    pod.application().unwrap().signal(Signal::SIGTERM);
    assert!(pod.application().unwrap().wait(LONG).is_some());
    let (status, text) = status_in_pod(&pod, &["--check"]);
    assert_eq!(status, Status::Code(0), "{text}");
    assert!(text.ends_with("\nA hold would end after the settle time: clear.\n"), "{text}");
    assert_eq!(validated(&status_in_pod(&pod, &["--json"]).1)["verdict"], "clear");
}

// --- What cannot be known ---

#[test]
fn a_table_that_cannot_be_read_is_not_known_and_named() {
    let programs = Programs::default();
    let envoy = programs.copy(program("sockets"), "envoy");
    let space = Space::start(&[&envoy]);
    let outlast = outlast();
    for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let strace = ["strace", "-qqo", "/dev/null", "-P", path, "-e", "inject=open,openat:error=EACCES"];
        let status = [outlast.to_str().unwrap(), "status", "--source=proc"];
        let (status_code, text) = output(&space, &[&strace[..], &status, &["--check"]].concat());
        assert_eq!(status_code, 4, "{text}");
        let conclusion = text.lines().last().unwrap();
        assert!(conclusion.contains("not everything can be read") && conclusion.contains(path), "{text}");
        let (status_code, text) = output(&space, &[&strace[..], &status, &["--json"]].concat());
        assert_eq!(status_code, 0, "without --check");
        let document = validated(&text);
        assert_eq!(document["verdict"], "unknown");
        assert!(document["error"].as_str().unwrap().contains(path), "{text}");
    }
}

#[test]
fn an_answer_that_no_one_reads_is_not_known() {
    let programs = Programs::default();
    let envoy = programs.copy(program("sockets"), "envoy");
    let space = Space::start(&[&envoy]);
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let outlast = outlast();
    let mut command = space.command(&[outlast.to_str().unwrap(), "status", "--check"]);
    assert_eq!(command.stdout(full).status().unwrap().code(), Some(4));
}

#[test]
fn without_a_proxy_a_hold_would_end_at_once() {
    let programs = Programs::default();
    let server = programs.copy(program("sockets"), "server");
    let space = Space::start(&[&server]);
    let _listener = space.inside(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    let outlast = outlast();
    let (status, text) = output(&space, &[outlast.to_str().unwrap(), "status", "--check"]);
    assert_eq!(status, 0);
    assert!(
        text.ends_with("\nA hold would end at once: no process is called envoy or pilot-agent.\n"),
        "{text}"
    );
    let json = output(&space, &[outlast.to_str().unwrap(), "status", "--json"]).1;
    assert_eq!(validated(&json)["verdict"], "proxy-gone");
}

#[test]
fn every_socket_that_would_hold_is_shown_as_one_beside_undelivered_bytes() {
    let programs = Programs::default();
    let envoy = programs.copy(program("sockets"), "envoy");
    let space = Space::start(&[&envoy]);
    let of = |shape| Spec { shape, family: Family::V4 };
    let _made =
        space.inside(|| [Shape::Listener, Shape::OrphanFinWait1].map(|shape| make(of(shape)).unwrap()));
    let outlast = outlast();
    let json = output(&space, &[outlast.to_str().unwrap(), "status", "--json"]).1;
    let document = validated(&json);
    assert_eq!((&document["listeners"], &document["undelivered"]), (&2.into(), &1.into()), "{document:#}");
}

#[test]
fn the_command_of_outlast_run_is_the_proxy_whatever_its_name() {
    let (programs, outlast) = (Programs::default(), outlast());
    let server = programs.copy(program("sockets"), "server");
    let outlast = outlast.to_str().unwrap();
    let space = Space::start(&[outlast, "run", "--", &server, "--listen=0.0.0.0:4143"]);
    await_that("the listener", || output(&space, &[outlast, "status"]).1.contains(":4143"));
    let (status, text) = output(&space, &[outlast, "status", "--check"]);
    assert_eq!(status, 0, "{text}");
    assert!(text.contains("/server  proxy ") && text.contains("clear"), "{text}");
}
