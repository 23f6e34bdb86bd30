//! The table of flags: it drives the parser, the environment, the help and the README's table.

use std::time::Duration;

use super::values::{Expected, boolean, duration, names, ranges, word};
use super::{Command, OnTimeout, Quit, Settings};
use crate::log::{Format, Level};
use crate::pod::kernel::Source;
use crate::pod::owners::Kinds;
use crate::proxy_api::Url;

/// One flag, and with it one environment variable.
pub struct Flag {
    /// Its name, without the dashes.
    pub name: &'static str,
    /// What its value is called; empty for a boolean, whose value may be left out.
    pub value: &'static str,
    /// The default, as one would write it.
    pub default: &'static str,
    /// The commands that know it.
    pub commands: &'static [Command],
    /// What it is, on one line.
    pub short: &'static str,
    /// What else there is to know.
    pub long: &'static str,
    /// Checks a value and keeps it.
    pub set: fn(&mut Settings, &str) -> Result<(), Expected>,
}

impl Flag {
    /// The variable's name.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("OUTLAST_{}", self.name.to_ascii_uppercase().replace('-', "_"))
    }
}

use Command::{App, Install, Poststart, Prestop, Run, Status};

/// All flags, in the order of the help.
pub const FLAGS: &[Flag] = &[
    Flag {
        name: "grace-period",
        value: "DURATION",
        default: "30s",
        commands: &[Run, Prestop],
        short: "The Pod's terminationGracePeriodSeconds.",
        long: "Nothing inside a container can read it: say it here when the Pod sets another than 30 s.",
        set: |settings, text| store(&mut settings.grace_period, duration(text)),
    },
    Flag {
        name: "timeout",
        value: "DURATION",
        default: "grace period - 7s",
        commands: &[Run, Prestop],
        short: "The longest hold; 0 means do not hold.",
        long: "The default is the grace period less 7 s, which pilot-agent's own drain (5 s) and kubelet (2 s) need, \
               and never less than half of the grace period.",
        set: |settings, text| store(&mut settings.timeout, duration(text).map(Some)),
    },
    Flag {
        name: "min-wait",
        value: "DURATION",
        default: "0",
        commands: &[Run, Prestop],
        short: "The shortest hold, for the removal of the endpoint to spread.",
        long: "It replaces a `sleep 15` before the stop. It is cut to the timeout.",
        set: |settings, text| store(&mut settings.min_wait, duration(text)),
    },
    Flag {
        name: "settle",
        value: "DURATION",
        default: "200ms",
        commands: &[Run, Prestop],
        short: "How long there must have been no holder before the release.",
        long: "It covers an application that closes and reopens a listener.",
        set: |settings, text| store(&mut settings.settle, duration(text)),
    },
    Flag {
        name: "hold",
        value: "KIND,...",
        default: "listeners,connections,undelivered",
        commands: &[Run, Prestop, Status],
        short: "What holds: listeners, connections, undelivered.",
        long: "listeners and connections are the application's TCP sockets; undelivered are bytes that the proxy \
               still has to pass on. `listeners` alone is what a loop over netstat waits for.",
        set: |settings, text| store(&mut settings.rules.hold, kinds(text)),
    },
    Flag {
        name: "poll",
        value: "DURATION",
        default: "auto",
        commands: &[Run, Prestop],
        short: "The time between looks.",
        long: "auto follows what a look costs, within 10ms and 250ms, so that a hold stays below 1 % of a core. The \
               look that ends the settle time is made exactly then.",
        set: |settings, text| store(&mut settings.poll, poll(text)),
    },
    Flag {
        name: "proxy",
        value: "NAME,...",
        default: "envoy,pilot-agent",
        commands: &[Run, Prestop, Status],
        short: "Names of the proxy's processes.",
        long: "They are compared with the kernel's name of a process (comm), as the kernel does: on 15 bytes. \
               Linkerd: linkerd2-proxy. Consul: consul-dataplane,envoy. Kuma: kuma-dp,envoy.",
        set: |settings, text| store(&mut settings.rules.proxy, names(text)),
    },
    Flag {
        name: "ignore-port",
        value: "PORT,...",
        default: "none",
        commands: &[Run, Prestop, Status],
        short: "Local ports that never hold, such as 9000-9099.",
        long: "For other sidecars that listen for ever.",
        set: |settings, text| {
            store(&mut settings.rules.ignore_ports, none_or(text, |text| ranges(text, "ports")))
        },
    },
    Flag {
        name: "ignore-uid",
        value: "UID,...",
        default: "none",
        commands: &[Run, Prestop, Status],
        short: "Uids whose sockets never hold.",
        long: "The uid is that of the process that made the socket.",
        set: |settings, text| {
            store(&mut settings.rules.ignore_uids, none_or(text, |text| ranges(text, "uids")))
        },
    },
    Flag {
        name: "source",
        value: "SOURCE",
        default: "auto",
        commands: &[Run, Prestop, Status],
        short: "Where sockets are read: auto, diag or proc.",
        long: "diag asks the kernel over netlink, which costs the same however many connections there are; proc reads \
               /proc/net/tcp. auto is diag where the kernel answers it, which a seccomp profile or gVisor may prevent.",
        set: |settings, text| store(&mut settings.source, word(text, &Source::NAMES)),
    },
    Flag {
        name: "native-sidecar",
        value: "",
        default: "false",
        commands: &[Run, Prestop],
        short: "The container is a native sidecar: never hold.",
        long: "Kubelet itself stops a native sidecar (an init container with restartPolicy Always) after the \
               application. A hold would wait for earlier sidecars, which wait for it. run forwards the signal at once, \
               prestop does what Istio's own hook does there: POST 15020 /drain.",
        set: |settings, text| store(&mut settings.native_sidecar, boolean(text)),
    },
    Flag {
        name: "drain",
        value: "DELAY",
        default: "off",
        commands: &[Run, Prestop],
        short: "How long after the hold's start Envoy is told to drain.",
        long: "It then asks keep-alive and gRPC clients to leave (`connection: close`, GOAWAY) while the application \
               still serves, and goes on accepting. Clients that have not heard of the Pod's end come back: so leave \
               them time to. Istio has Envoy ask all at once (--drain-strategy immediate); a plain Envoy spreads this \
               over its drain time (--drain-time-s, 600 s).",
        set: |settings, text| store(&mut settings.drain, drain(text)),
    },
    Flag {
        name: "fast-exit",
        value: "",
        default: "true",
        commands: &[Run],
        short: "Skip pilot-agent's own 5 s once the hold is clear.",
        long: "Where an application was seen and is gone, and no undelivered bytes are left, there is nothing to drain: \
               pilot-agent is told so (POST 15020 /drain, since Istio 1.21), and its Envoy to end. Anywhere else, as in a \
               gateway, pilot-agent gets the signal alone and drains.",
        set: |settings, text| store(&mut settings.fast_exit, boolean(text)),
    },
    Flag {
        name: "signal-group",
        value: "",
        default: "false",
        commands: &[Run, App],
        short: "Pass signals to COMMAND's process group.",
        long: "For a COMMAND that is a shell script, which would leave its children without the signal. Off by \
               default: a signal to the group kills Envoy under pilot-agent.",
        set: |settings, text| store(&mut settings.signal_group, boolean(text)),
    },
    Flag {
        name: "exit-zero",
        value: "",
        default: "false",
        commands: &[Prestop],
        short: "Return 0 even when the timeout was reached.",
        long: "A hook that fails leaves the event FailedPreStopHook, by which a timeout is seen. This avoids it.",
        set: |settings, text| store(&mut settings.exit_zero, boolean(text)),
    },
    Flag {
        name: "ready-url",
        value: "URL",
        default: "http://127.0.0.1:15021/healthz/ready",
        commands: &[Poststart, App],
        short: "Where 200 says that the proxy is ready.",
        long: "On this host only, without TLS: 127.0.0.1 is asked, and ::1 where nothing listens there.",
        set: |settings, text| store(&mut settings.ready_url, Url::parse(text)),
    },
    Flag {
        name: "ready-timeout",
        value: "DURATION",
        default: "60s",
        commands: &[Poststart, App],
        short: "How long to wait for the proxy to be ready.",
        long: "One look is made even with 0.",
        set: |settings, text| store(&mut settings.ready_timeout, duration(text)),
    },
    Flag {
        name: "on-timeout",
        value: "WHAT",
        default: "fail",
        commands: &[Poststart, App],
        short: "When the proxy is not ready in time: fail (exit 124) or continue.",
        long: "A postStart hook that fails has its container restarted by kubelet.",
        set: |settings, text| {
            let words = [("fail", OnTimeout::Fail), ("continue", OnTimeout::Continue)];
            store(&mut settings.on_timeout, word(text, &words))
        },
    },
    Flag {
        name: "quit",
        value: "WHEN",
        default: "never",
        commands: &[App],
        short: "When the proxy is asked to quit after COMMAND: never, always or on-success.",
        long: "So that Jobs complete. In a Pod with restartPolicy Never: always. With OnFailure: on-success, for a \
               retry needs the proxy. Never in a Pod with a second application container.",
        set: |settings, text| {
            let words = [("never", Quit::Never), ("always", Quit::Always), ("on-success", Quit::OnSuccess)];
            store(&mut settings.quit, word(text, &words))
        },
    },
    Flag {
        name: "quit-url",
        value: "URL,...",
        default: "http://127.0.0.1:15020/quitquitquit",
        commands: &[App],
        short: "Where the proxy is asked to quit, by POST.",
        long: "On this host only, without TLS. Each is tried for 5 s while it refuses or answers 5xx; the end of the \
               proxy is then waited for, for 10 s at most.",
        set: |settings, text| {
            store(&mut settings.quit_url, text.split(',').map(|url| Url::parse(url.trim())).collect())
        },
    },
    Flag {
        name: "presence",
        value: "",
        default: "true",
        commands: &[App],
        short: "Keep a listener open while COMMAND lives.",
        long: "The first free port of 15900 to 15999 on loopback: so even a worker that finishes in silence is waited for.",
        set: |settings, text| store(&mut settings.presence, boolean(text)),
    },
    Flag {
        name: "disable",
        value: "",
        default: "false",
        commands: &[App],
        short: "Become COMMAND and do nothing else.",
        long: "For an image that is used with and without a mesh.",
        set: |settings, text| store(&mut settings.disable, boolean(text)),
    },
    Flag {
        name: "json",
        value: "",
        default: "false",
        commands: &[Status],
        short: "Print one JSON document.",
        long: "docs/status.schema.json describes it.",
        set: |settings, text| store(&mut settings.json, boolean(text)),
    },
    Flag {
        name: "check",
        value: "",
        default: "false",
        commands: &[Status],
        short: "Say by the exit status whether anything holds.",
        long: "0: nothing holds, or no proxy is there to hold for. 3: something does. 4: not everything could be read.",
        set: |settings, text| store(&mut settings.check, boolean(text)),
    },
    Flag {
        name: "log-format",
        value: "FORMAT",
        default: "text",
        commands: &[Run, Prestop, Poststart, App, Status, Install],
        short: "text or json.",
        long: "One event a line on stderr, in both.",
        set: |settings, text| store(&mut settings.log_format, word(text, &Format::NAMES)),
    },
    Flag {
        name: "log-level",
        value: "LEVEL",
        default: "info",
        commands: &[Run, Prestop, Poststart, App, Status, Install],
        short: "error, warn, info or debug.",
        long: "A hold is told at info.",
        set: |settings, text| store(&mut settings.log_level, word(text, &Level::NAMES)),
    },
];

fn store<T>(place: &mut T, value: Result<T, Expected>) -> Result<(), Expected> {
    *place = value?;
    Ok(())
}

fn none_or<T>(text: &str, parse: impl Fn(&str) -> Result<Vec<T>, Expected>) -> Result<Vec<T>, Expected> {
    if text == "none" { Ok(Vec::new()) } else { parse(text) }
}

fn poll(text: &str) -> Result<Option<Duration>, Expected> {
    const LEAST: Duration = Duration::from_millis(1);
    match text {
        "auto" => Ok(None),
        text => match duration(text) {
            Ok(poll) if poll >= LEAST => Ok(Some(poll)),
            Ok(_) => Err("auto or at least 1ms".into()),
            Err(expected) => Err(format!("auto or {expected}")),
        },
    }
}

fn drain(text: &str) -> Result<Option<Duration>, Expected> {
    match text {
        "off" => Ok(None),
        text => duration(text).map(Some).map_err(|expected| format!("off or {expected}")),
    }
}

fn kinds(text: &str) -> Result<Kinds, Expected> {
    let mut kinds = Kinds { listeners: false, connections: false, undelivered: false };
    for kind in text.split(',') {
        match kind.trim() {
            "listeners" => kinds.listeners = true,
            "connections" => kinds.connections = true,
            "undelivered" => kinds.undelivered = true,
            _ => return Err("listeners, connections or undelivered, separated by commas".into()),
        }
    }
    Ok(kinds)
}
