//! Whose socket is it: the rules of ownership, on plain values.

use std::collections::HashSet;
use std::fmt;
use std::ops::RangeInclusive;

use super::{Row, State, is_loopback};

/// Ports of pilot-agent and Envoy in a sidecar (istio.io: Ports used by Istio).
pub const RESERVED_PORTS: [u16; 9] = [15000, 15001, 15004, 15006, 15008, 15020, 15021, 15053, 15090];
/// Of these, the ones that carry the application's bytes.
const DATA_PORTS: [u16; 3] = [15001, 15006, 15008];
/// `comm` holds this many bytes (`TASK_COMM_LEN` of `include/linux/sched.h`, less the terminator).
const NAME_BYTES: usize = 15;

/// Whose socket it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// Anything but the proxy.
    Application,
    /// The processes that the sidecar exists for.
    Proxy,
    /// Set aside by a setting, or outlast's own.
    Ignored,
    /// No process: closed, or not yet accepted.
    Nobody,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Owner::Application => "application",
            Owner::Proxy => "proxy",
            Owner::Ignored => "ignored",
            Owner::Nobody => "nobody",
        })
    }
}

/// The rule that decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// `--ignore-port`.
    IgnoredPort,
    /// `--ignore-uid`.
    IgnoredUid,
    /// outlast itself holds the inode.
    Own,
    /// A proxy process holds the inode.
    Inode,
    /// The fd table of a proxy process with this uid cannot be read.
    Uid,
    /// The fd table of a proxy process with uid 0 cannot be read: by port.
    ReservedPort,
    /// No visible proxy process holds it: the application, or another container.
    Other,
    /// No process holds it: its inode is 0.
    NoInode,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::IgnoredPort => "ignored-port",
            Rule::IgnoredUid => "ignored-uid",
            Rule::Own => "own",
            Rule::Inode => "inode",
            Rule::Uid => "uid",
            Rule::ReservedPort => "reserved-port",
            Rule::Other => "other",
            Rule::NoInode => "no-inode",
        })
    }
}

/// What can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kinds {
    /// The application's listeners.
    pub listeners: bool,
    /// The application's connections.
    pub connections: bool,
    /// Bytes that the proxy still has to pass on.
    pub undelivered: bool,
}

/// The settings that decide about owners and holders.
#[derive(Clone, Debug)]
pub struct Rules {
    /// What holds.
    pub hold: Kinds,
    /// Names of the proxy's processes.
    pub proxy: Vec<String>,
    /// Local ports that never hold.
    pub ignore_ports: Vec<RangeInclusive<u16>>,
    /// Uids that never hold.
    pub ignore_uids: Vec<RangeInclusive<u32>>,
}

impl Rules {
    /// Whether a process with this `comm` is one of the proxy's, compared as the kernel keeps names: on 15 bytes.
    #[must_use]
    pub fn names(&self, comm: &str) -> bool {
        let cut =
            |name: &str| name.as_bytes().get(..NAME_BYTES).map_or(name.as_bytes().to_vec(), <[u8]>::to_vec);
        self.proxy.iter().any(|name| cut(name) == comm.as_bytes())
    }
}

/// Whether a process with control groups `other` runs in the container of one with `own`: in the same groups or below.
///
/// A line of /proc/PID/cgroup is `hierarchy:controllers:path` (cgroups(7)). Under a cgroup namespace our own path is `/`
/// and another container's begins with `/..`.
#[must_use]
pub fn same_container(own: &str, other: &str) -> bool {
    let groups = |text: &str| -> Vec<(String, String)> {
        let split =
            |line: &str| line.rsplit_once(':').map(|(group, path)| (group.to_string(), path.to_string()));
        text.lines().filter_map(split).collect()
    };
    let others = groups(other);
    groups(own).iter().all(|(group, own)| {
        let other = others.iter().find(|(name, _)| name == group).map(|(_, path)| path);
        let below = |path: &String| {
            let rest = path.strip_prefix(own.trim_end_matches('/'));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') && !rest.starts_with("/.."))
        };
        other.is_none_or(below)
    })
}

/// What the fd tables said.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// Inodes held by proxy processes.
    pub proxy: HashSet<u64>,
    /// Inodes held by outlast.
    pub own: HashSet<u64>,
    /// Effective uids of the proxy processes whose fd table cannot be read.
    pub unreadable: Vec<u32>,
}

impl Evidence {
    /// An unreadable proxy runs as root, so that nothing tells its connections from the application's.
    #[must_use]
    pub fn only_ports_tell(&self) -> bool {
        self.unreadable.contains(&0)
    }
}

/// Decides whose socket it is: the first rule that answers.
#[must_use]
pub fn decide(row: &Row, rules: &Rules, evidence: &Evidence) -> (Owner, Rule) {
    if rules.ignore_ports.iter().any(|range| range.contains(&row.local.port())) {
        (Owner::Ignored, Rule::IgnoredPort)
    } else if rules.ignore_uids.iter().any(|range| range.contains(&row.uid)) {
        (Owner::Ignored, Rule::IgnoredUid)
    } else if row.inode == 0 {
        (Owner::Nobody, Rule::NoInode)
    } else if evidence.own.contains(&row.inode) {
        (Owner::Ignored, Rule::Own)
    } else if evidence.proxy.contains(&row.inode) {
        (Owner::Proxy, Rule::Inode)
    } else if row.uid != 0 && evidence.unreadable.contains(&row.uid) {
        (Owner::Proxy, Rule::Uid)
    } else if evidence.only_ports_tell() && RESERVED_PORTS.contains(&row.local.port()) {
        (Owner::Proxy, Rule::ReservedPort)
    } else {
        (Owner::Application, Rule::Other)
    }
}

/// Whether the proxy has bytes left to pass on, or may still get some.
///
/// The ports of its own affairs (admin, health, metrics, the agent) carry none of the application's bytes: a scrape or
/// a probe must not keep it. On its other listeners, connections that it has not accepted yet may have brought a
/// request already, and their senders may be gone: a starved Envoy has not even seen them.
#[must_use]
pub fn proxy_owes(row: &Row) -> bool {
    let pending =
        row.send_queue > 0 || row.receive_queue > 0 || matches!(row.state, State::SynSent | State::CloseWait);
    pending && !is_own_affair(row)
}

/// Whether one end is a port of the proxy's own affairs, here or asked from here.
fn is_own_affair(row: &Row) -> bool {
    let own = |port| RESERVED_PORTS.contains(&port) && !DATA_PORTS.contains(&port);
    own(row.local.port()) || (is_loopback(row.remote.ip()) && own(row.remote.port()))
}

/// Whether a socket that no process holds any more has bytes left to deliver.
#[must_use]
pub fn orphan_owes(row: &Row) -> bool {
    row.inode == 0
        && row.send_queue > 0
        && !is_own_affair(row)
        && !matches!(row.state, State::Listen | State::TimeWait | State::SynRecv | State::NewSynRecv)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn rules() -> Rules {
        Rules {
            hold: Kinds { listeners: true, connections: true, undelivered: true },
            proxy: vec!["envoy".into(), "pilot-agent".into(), "consul-dataplane".into()],
            ignore_ports: vec![9000..=9099],
            ignore_uids: vec![65_532..=65_534],
        }
    }

    pub(crate) fn row(local: &str, remote: &str, state: State, uid: u32, inode: u64) -> Row {
        let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
        Row { local, remote, state, send_queue: 0, receive_queue: 0, uid, inode }
    }

    #[test]
    fn names_are_compared_on_15_bytes() {
        let rules = rules();
        assert!(rules.names("envoy") && rules.names("consul-dataplan"));
        assert!(!rules.names("envoy2") && !rules.names("envo") && !rules.names("consul-datapla"));
    }

    #[test]
    fn containers_are_told_apart_by_control_group() {
        let v1 = |path: &str| format!("8:pids:{path}\n2:cpuacct:{path}\n0::/\n");
        assert!(same_container(&v1("/pods/a/x"), &v1("/pods/a/x")));
        assert!(same_container(&v1("/pods/a/x"), &v1("/pods/a/x/below")));
        assert!(!same_container(&v1("/pods/a/x"), &v1("/pods/a/xy")));
        assert!(!same_container(&v1("/pods/a/x"), &v1("/pods/a")));
        assert!(same_container("0::/\n", "0::/\n") && same_container("0::/\n", "0::/init\n"));
        assert!(!same_container("0::/\n", "0::/../cri-containerd-5f.scope\n"));
        assert!(same_container("", "0::/x\n"), "nothing is known");
    }

    #[test]
    fn the_first_rule_that_answers_wins() {
        let evidence = Evidence { proxy: [7].into(), own: [8].into(), unreadable: vec![1337] };
        let listener = |port: u16, uid, inode| {
            decide(
                &row(&format!("0.0.0.0:{port}"), "0.0.0.0:0", State::Listen, uid, inode),
                &rules(),
                &evidence,
            )
        };
        assert_eq!(listener(9000, 1337, 7), (Owner::Ignored, Rule::IgnoredPort));
        assert_eq!(listener(8080, 65_533, 7), (Owner::Ignored, Rule::IgnoredUid));
        assert_eq!(listener(8080, 1337, 8), (Owner::Ignored, Rule::Own));
        assert_eq!(listener(8080, 1000, 7), (Owner::Proxy, Rule::Inode));
        assert_eq!(listener(8080, 1337, 1), (Owner::Proxy, Rule::Uid));
        assert_eq!(listener(15006, 1000, 1), (Owner::Application, Rule::Other), "anyone can take a port");
        assert_eq!(listener(8080, 0, 1), (Owner::Application, Rule::Other));
    }

    #[test]
    fn an_unreadable_proxy_of_root_is_known_by_its_ports_alone() {
        let evidence = Evidence { unreadable: vec![0], ..Evidence::default() };
        let owner = |port: u16| {
            decide(&row(&format!("0.0.0.0:{port}"), "0.0.0.0:0", State::Listen, 0, 1), &rules(), &evidence)
        };
        assert_eq!(owner(15006), (Owner::Proxy, Rule::ReservedPort));
        assert_eq!(owner(8080), (Owner::Application, Rule::Other));
    }

    #[test]
    fn a_proxy_owes_what_is_queued_or_may_come_but_not_to_scrapers_and_probes() {
        let base = row("10.0.0.1:15006", "10.0.0.2:4000", State::Established, 1337, 7);
        assert!(!proxy_owes(&base));
        assert!(proxy_owes(&Row { send_queue: 1, ..base }));
        assert!(proxy_owes(&Row { receive_queue: 1, ..base }));
        assert!(proxy_owes(&Row { state: State::CloseWait, ..base }));
        assert!(proxy_owes(&Row { state: State::SynSent, ..base }));
        let busy = Row { send_queue: 1, ..base };
        for local in ["10.0.0.1:15090", "127.0.0.1:15000", "[::ffff:10.0.0.1]:15020", "10.0.0.1:15021"] {
            assert!(!proxy_owes(&Row { local: local.parse().unwrap(), ..busy }), "{local}");
        }
        let asking = |remote: &str| Row {
            local: "127.0.0.1:40000".parse().unwrap(),
            remote: remote.parse().unwrap(),
            ..busy
        };
        assert!(!proxy_owes(&asking("127.0.0.1:15000")));
        assert!(proxy_owes(&asking("10.0.0.9:15090")), "another Pod's port says nothing");
        let listener = row("0.0.0.0:15006", "0.0.0.0:0", State::Listen, 1337, 7);
        assert!(!proxy_owes(&listener));
        assert!(proxy_owes(&Row { receive_queue: 1, ..listener }), "not accepted yet");
        let health = row("0.0.0.0:15021", "0.0.0.0:0", State::Listen, 1337, 7);
        assert!(!proxy_owes(&Row { receive_queue: 1, ..health }));
    }

    #[test]
    fn an_orphan_owes_its_unsent_bytes() {
        let base = row("10.0.0.1:15006", "10.0.0.2:4000", State::FinWait1, 0, 0);
        assert!(!orphan_owes(&base));
        assert!(orphan_owes(&Row { send_queue: 1, ..base }));
        assert!(orphan_owes(&Row { send_queue: 1, state: State::LastAck, ..base }));
        assert!(!orphan_owes(&Row { send_queue: 1, state: State::TimeWait, ..base }));
        assert!(!orphan_owes(&Row { send_queue: 1, inode: 5, ..base }));
        let scrape = row("10.0.0.1:15090", "10.0.0.2:4000", State::FinWait1, 0, 0);
        assert!(!orphan_owes(&Row { send_queue: 1, ..scrape }));
    }
}
