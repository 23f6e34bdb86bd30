//! `outlast prestop`: the hook.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use crate::cli::Parsed;
use crate::exit::Exit;
use crate::hold::{Reason, Terms};
use crate::init::signals::Name;
use crate::log::{Field, Log, Seconds};
use crate::pod::kernel::{Kernel, Source, System, Visible, command_line};
use crate::pod::snapshot::proxies_among;
use crate::proxy_api::{ProxyApi, Url};
use crate::stop::Stop;
use crate::watch::Watch;

/// Holds, then says how it went. `run` is the `outlast run` above the proxy.
pub fn prestop(parsed: &Parsed, terms: Terms, run: Option<Visible>, log: &Log) -> Exit {
    let exit = hold(parsed, terms, run, log);
    if parsed.problems.is_empty() { exit } else { Exit::Usage }
}

fn hold(parsed: &Parsed, terms: Terms, run: Option<Visible>, log: &Log) -> Exit {
    let mut stop = match Stop::catch() {
        Ok(stop) => Some(stop),
        Err(error) => {
            log.warn("cannot catch signals: none ends the hook", &[("error", &error)]);
            None
        }
    };
    let mut wait = |time: Duration| {
        if let Some(stop) = &mut stop {
            return stop.wait(time);
        }
        std::thread::sleep(time);
        None
    };
    if parsed.settings.native_sidecar {
        // As Istio's own hook there, and like it without a say in the stop: kubelet stops the proxy after the application.
        let reason: Field = ("reason", &Reason::Off);
        if let Err(error) = ProxyApi::new().tell(&Url::agent_drain()) {
            log.warn("cannot tell the proxy to drain", &[reason, ("error", &error)]);
        } else {
            log.info("the proxy drains: a native sidecar does not hold", &[reason]);
        }
        return Exit::Success;
    }
    if let Some(run) = run {
        return step_back(parsed, terms, &run, log, &mut wait);
    }
    if terms.timeout.is_zero() {
        log.info("hold released", &[("reason", &Reason::Off), ("timeout", &Seconds(terms.timeout))]);
        return Exit::Success;
    }
    let mut watch = Watch::start(log, &parsed.settings, terms, None);
    loop {
        let signal = wait(watch.time_left());
        let reason = signal.and_then(|number| watch.signal(number)).or_else(|| watch.look_if_due());
        if let Some(reason) = reason {
            watch.released(reason);
            return match reason {
                Reason::Timeout if !parsed.settings.exit_zero => Exit::Timeout,
                Reason::Signal(number) => Exit::Signal(u8::try_from(number).unwrap_or(u8::MAX)),
                _ => Exit::Success,
            };
        }
    }
}

/// The other half of the container: what a hook can see of it at its start.
pub struct Pod {
    /// The container's main process, whose stderr the runtime keeps.
    pub main: i32,
    /// The `outlast run` above the proxy.
    pub run: Option<Visible>,
}

impl Pod {
    /// Looks at the process list once.
    #[must_use]
    pub fn see(rules: &crate::pod::owners::Rules) -> Pod {
        let mut kernel = System::open(Source::Proc);
        // Without a list there is no ancestor to find: the hook holds by itself.
        let processes = kernel.processes().unwrap_or_default();
        let parent = |of: &Visible| processes.iter().find(|process| process.pid == of.parent);
        let proxies = proxies_among(&mut kernel, &processes, rules, None);
        let mut pod = Pod { main: 1, run: None };
        for proxy in &proxies {
            // Pids that are reused while we read could close a circle; no chain is longer than the list.
            let chain = std::iter::successors(Some(proxy), |process| parent(process)).take(processes.len());
            for process in chain {
                pod.main = process.pid;
                if is_outlast_run(process) {
                    pod.run = Some(process.clone());
                }
            }
        }
        pod
    }
}

/// Whether it is an `outlast run`: by the kernel's name of the process, for its file may not be readable, and the word
/// that chose the command.
#[must_use]
pub fn is_outlast_run(process: &Visible) -> bool {
    process.name == "outlast"
        && command_line(process.pid).is_ok_and(|words| words.get(1).is_some_and(|word| word == "run"))
}

/// `outlast run` will hold: so that the two never add up, only the hook's own min-wait is waited for. One from the
/// environment is run's as well, and run waits for it.
fn step_back(
    parsed: &Parsed,
    terms: Terms,
    run: &Visible,
    log: &Log,
    wait: &mut dyn FnMut(Duration) -> Option<i32>,
) -> Exit {
    let own_wait = parsed.given.contains(&"min-wait");
    let time = if own_wait { terms.min_wait } else { Duration::ZERO };
    let shown = Seconds(time);
    let fields: [Field; 2] = [("run", &run.pid), ("min_wait", &shown)];
    log.info("outlast run holds in this container: the hook waits for its own min-wait only", &fields);
    let words = command_line(run.pid).unwrap_or_default();
    let words: Vec<&OsString> = words.iter().take_while(|word| *word != "--").collect();
    for flag in parsed.given.iter().filter(|flag| !["min-wait", "log-format", "log-level"].contains(flag)) {
        let name = format!("--{flag}");
        let known = words.iter().any(|word| {
            word.to_str().is_some_and(|word| {
                word.strip_prefix(&name).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
            })
        });
        if !known {
            log.warn(
                "a flag of the hook alone has no effect: give it to outlast run, or set its variable",
                &[("flag", &name)],
            );
        }
    }
    let end = Instant::now().checked_add(time);
    loop {
        let left = end.map_or(time, |end| end.saturating_duration_since(Instant::now()));
        if let Some(number) = wait(left) {
            log.info("a signal ends the hook", &[("signal", &Name(number))]);
            return Exit::Signal(u8::try_from(number).unwrap_or(u8::MAX));
        }
        if left.is_zero() {
            return Exit::Success;
        }
    }
}
