//! `outlast run`: the entrypoint.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cli::Settings;
use crate::exit::Exit;
use crate::hold::{Reason, Terms};
use crate::init::child::Child;
use crate::init::signals::{Arrived, Name, Signals};
use crate::log::{Field, Log, Seconds};
use crate::proxy_api::{ProxyApi, Url};
use crate::watch::Watch;

/// Starts COMMAND, passes signals on, holds on a stop signal, reaps; returns COMMAND's status.
pub fn run(settings: &Settings, terms: Terms, command: Vec<OsString>, log: &Log) -> Exit {
    let signals = match Signals::take_over(log) {
        Ok(signals) => signals,
        Err(exit) => return exit,
    };
    let child = match Child::start(&command, settings.signal_group, &[signals.raw()], log) {
        Ok(child) => child,
        Err(exit) => return exit,
    };
    // 2 MB of arguments are not for the life of a Pod.
    drop(command);
    let mut phase = Phase::Before;
    loop {
        let time = match &phase {
            Phase::Holding(_, watch) => Some(watch.time_left()),
            Phase::Ending(_, began) => Some(ENVOYS_END.saturating_sub(began.elapsed())),
            Phase::Before | Phase::After => None,
        };
        signals.wait(time);
        while let Some(arrived) = signals.next() {
            phase = on_signal(phase, arrived, &child, settings, terms, log);
        }
        if let Some(exit) = child.reap() {
            if let Phase::Holding(_, watch) = &phase {
                watch.released(Reason::ProxyGone);
            }
            log.info("COMMAND ended", &[("status", &u8::from(exit))]);
            return exit;
        }
        if let Phase::Holding(stop, watch) = &mut phase
            && let Some(reason) = watch.look_if_due()
        {
            watch.released(reason);
            let fast = settings.fast_exit && reason == Reason::Clear && watch.nothing_to_drain();
            phase = if fast && end_envoy(watch, log) {
                Phase::Ending(*stop, Instant::now())
            } else {
                child.stop(*stop);
                Phase::After
            };
        }
        if let Phase::Ending(stop, began) = phase
            && began.elapsed() >= ENVOYS_END
        {
            child.stop(stop);
            phase = Phase::After;
        }
    }
}

/// How long pilot-agent's Envoy may take to end before pilot-agent gets the signal, and kills it.
const ENVOYS_END: Duration = Duration::from_secs(2);

/// Before, in and after the hold. The number is that of the stop signal that started it.
enum Phase<'a> {
    Before,
    Holding(i32, Box<Watch<'a>>),
    /// After a hold, while pilot-agent's Envoy ends by itself, and pilot-agent with it.
    Ending(i32, Instant),
    After,
}

fn on_signal<'a>(
    phase: Phase<'a>,
    arrived: Arrived,
    child: &Child,
    settings: &Settings,
    terms: Terms,
    log: &'a Log,
) -> Phase<'a> {
    let number = arrived.number;
    match (phase, number) {
        (Phase::Before, libc::SIGTERM | libc::SIGINT) => {
            let name = Name(number);
            if settings.native_sidecar || terms.timeout == Duration::ZERO {
                let timeout = Seconds(terms.timeout);
                let native: Field = ("native_sidecar", &settings.native_sidecar);
                let fields: [Field; 4] =
                    [("reason", &Reason::Off), ("signal", &name), native, ("timeout", &timeout)];
                log.info("hold released", &fields);
                child.stop(number);
                return Phase::After;
            }
            log.info("stop signal", &[("signal", &name), ("sender", &arrived.sender)]);
            Phase::Holding(number, Box::new(Watch::start(log, settings, terms, Some(child.pid()))))
        }
        (Phase::Holding(stop, watch), _) if watch.signal(number).is_some() => {
            log.info("a signal ends the hold", &[("signal", &Name(number))]);
            watch.released(Reason::Signal(number));
            child.stop(stop);
            Phase::After
        }
        (Phase::Holding(stop, watch), libc::SIGTERM) => {
            log.info("a further SIGTERM changes nothing: the hold goes on", &[("sender", &arrived.sender)]);
            Phase::Holding(stop, watch)
        }
        (Phase::Ending(..) | Phase::After, libc::SIGTERM | libc::SIGINT) => {
            child.stop(number);
            Phase::After
        }
        (phase, _) => {
            child.pass_on(arrived);
            phase
        }
    }
}

/// Skips pilot-agent's own drain: tells pilot-agent, then ends its Envoy, which pilot-agent follows. Says whether that
/// is under way.
///
/// The signal alone would have pilot-agent kill Envoy, with the last second of its access log unwritten.
fn end_envoy(watch: &Watch, log: &Log) -> bool {
    let envoys: Vec<i32> = watch.agents_envoys().collect();
    if envoys.is_empty() {
        return false;
    }
    if let Err(error) = ProxyApi::new().tell(&Url::agent_drain()) {
        log.warn("cannot skip pilot-agent's own drain", &[("error", &error)]);
        return false;
    }
    let end = |pid: &i32| kill(Pid::from_raw(*pid), Signal::SIGTERM);
    match envoys.iter().try_for_each(end) {
        Ok(()) => {
            log.info("nothing is left to drain: Envoy is told to end, and pilot-agent follows", &[]);
            true
        }
        Err(error) => {
            log.debug("cannot tell Envoy to end: pilot-agent kills it", &[("error", &error)]);
            false
        }
    }
}
