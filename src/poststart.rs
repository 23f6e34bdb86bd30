//! `outlast poststart`: the postStart hook, and the wait that `outlast app` begins with.

use std::time::{Duration, Instant};

use crate::cli::{OnTimeout, Settings};
use crate::exit::Exit;
use crate::init::signals::Name;
use crate::log::{Field, Log, Seconds};
use crate::proxy_api::{Method, ProxyApi};
use crate::stop::Stop;

/// The time between two requests.
const PAUSE: Duration = Duration::from_millis(250);

/// How a wait for readiness ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The proxy is ready.
    Yes,
    /// It is not, and the time is over.
    No,
    /// A signal ended the wait.
    Signal(i32),
}

/// Returns when the proxy is ready.
pub fn poststart(settings: &Settings, log: &Log) -> Exit {
    let mut stop = match Stop::catch() {
        Ok(stop) => stop,
        Err(error) => {
            log.error("cannot catch signals", &[("error", &error)]);
            return Exit::Failure;
        }
    };
    match wait_until_ready(settings, log, &mut |time| stop.wait(time)) {
        Ready::Yes => Exit::Success,
        Ready::No if settings.on_timeout == OnTimeout::Continue => Exit::Success,
        Ready::No => Exit::Timeout,
        Ready::Signal(number) => Exit::Signal(u8::try_from(number).unwrap_or(u8::MAX)),
    }
}

/// Asks at once and again until the answer is 200. `wait` returns a stop signal's number as soon as one has come.
pub fn wait_until_ready(
    settings: &Settings,
    log: &Log,
    wait: &mut dyn FnMut(Duration) -> Option<i32>,
) -> Ready {
    let start = Instant::now();
    let mut api = ProxyApi::new();
    loop {
        let answer = api.request(Method::Get, &settings.ready_url);
        let after = start.elapsed();
        let shown = Seconds(after);
        let problem = match answer {
            Ok(200) => {
                log.info("the proxy is ready", &[("after", &shown)]);
                return Ready::Yes;
            }
            Ok(status) => format!("status {status}"),
            Err(problem) => problem.to_string(),
        };
        let left = settings.ready_timeout.saturating_sub(after);
        // A signal that came during the request counts even when the time is over.
        if let Some(number) = wait(left.min(PAUSE)) {
            let signal = Name(number);
            let fields: [Field; 3] = [("signal", &signal), ("error", &problem), ("after", &shown)];
            log.info("a signal ends the wait for the proxy", &fields);
            return Ready::Signal(number);
        }
        if left.is_zero() {
            let url = &settings.ready_url;
            let fields: [Field; 3] = [("url", url), ("error", &problem), ("after", &shown)];
            match settings.on_timeout {
                OnTimeout::Fail => log.error("the proxy is not ready", &fields),
                OnTimeout::Continue => log.warn("the proxy is not ready: going on all the same", &fields),
            }
            return Ready::No;
        }
    }
}
