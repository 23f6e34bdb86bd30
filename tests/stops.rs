//! Stops that are not the end of a Pod as its application sees it: native sidecars, and a sidecar that is stopped
//! alone. With a real Envoy.
//!
//! Needs root, Envoy and the static binary: `scripts/test` has all three.

use pod::outlast;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pod::{End, Pod, Status};

/// Only a failure takes so long.
const LONG: Duration = Duration::from_secs(60);
/// Of the holds below.
const TIMEOUT: Duration = Duration::from_secs(12);

/// A Pod whose sidecar runs these words, and something else that listens.
fn pod(sidecar: &[&str], variables: &[(&str, &str)]) -> Pod {
    let mut builder = Pod::builder()
        .program(outlast(), "outlast")
        .sidecar(sidecar)
        .env("TERMINATION_DRAIN_DURATION_SECONDS", "1")
        .env("OUTLAST_TIMEOUT", "12s")
        .application(&["--listen", "0.0.0.0:8080"]);
    for (name, value) in variables {
        builder = builder.env(name, value);
    }
    builder.start().unwrap()
}

const RUN: &[&str] = &["outlast", "run", "--", "pilot-agent", "proxy", "sidecar"];
const PLAIN: &[&str] = &["pilot-agent", "proxy", "sidecar"];

/// Kubelet stops the later of two native sidecars, and the earlier one when that has exited. How long the later one
/// takes, which is the proxy.
fn stop_in_reverse_order(pod: &Pod, hook: bool) -> Duration {
    let began = Instant::now();
    if hook {
        let hook = pod.exec(&["outlast", "prestop"], "hook").unwrap();
        hook.wait(LONG).unwrap();
    }
    pod.sidecar().signal(Signal::SIGTERM);
    assert_eq!(pod.sidecar().wait(LONG).unwrap().status, Status::Code(0));
    let took = began.elapsed();
    let earlier = pod.application().unwrap();
    assert!(earlier.exit().is_none());
    earlier.signal(Signal::SIGTERM);
    assert_eq!(earlier.wait(LONG).unwrap().status, Status::Code(0));
    took
}

#[test]
fn a_native_sidecar_does_not_wait_for_an_earlier_one_that_waits_for_it_through_run() {
    let pod = pod(RUN, &[("OUTLAST_NATIVE_SIDECAR", "true")]);
    let took = stop_in_reverse_order(&pod, false);
    assert!(took < TIMEOUT, "{took:?}");
    assert!(pod.log().find("sidecar", "hold released reason=off").is_some());
    assert!(pod.log().find("sidecar", "hold started").is_none());
}

#[test]
fn without_the_flag_it_waits_in_vain_until_the_timeout_through_run() {
    let pod = pod(RUN, &[]);
    let took = stop_in_reverse_order(&pod, false);
    assert!(took >= TIMEOUT, "{took:?}");
    assert!(pod.log().find("sidecar", "hold released reason=timeout").is_some());
}

#[test]
fn a_native_sidecar_does_not_wait_for_an_earlier_one_that_waits_for_it_through_prestop() {
    let pod = pod(PLAIN, &[("OUTLAST_NATIVE_SIDECAR", "true")]);
    let took = stop_in_reverse_order(&pod, true);
    assert!(took < TIMEOUT, "{took:?}");
    assert!(pod.log().find("hook", "the proxy drains: a native sidecar does not hold").is_some());
}

#[test]
fn without_the_flag_it_waits_in_vain_until_the_timeout_through_prestop() {
    let pod = pod(PLAIN, &[]);
    let took = stop_in_reverse_order(&pod, true);
    assert!(took >= TIMEOUT, "{took:?}");
    assert!(pod.log().find("hook", "hold released reason=timeout").is_some());
}

/// What the log says when only the sidecar was stopped.
const ALONE: &str = "the application listens as at the start: it does not stop, or only the proxy's container was \
                     stopped, as by a failed probe";

#[test]
fn a_sidecar_that_is_stopped_alone_is_held_no_longer_than_the_timeout_and_the_log_says_why() {
    for (sidecar, source, hook) in [(RUN, "sidecar", false), (PLAIN, "hook", true)] {
        let pod = pod(sidecar, &[]);
        let began = Instant::now();
        if hook {
            let hook = pod.exec(&["outlast", "prestop"], "hook").unwrap();
            assert_eq!(hook.wait(LONG).unwrap().status, Status::Code(124));
        }
        pod.sidecar().signal(Signal::SIGTERM);
        // The application serves on, and until the release through the proxy.
        if !hook {
            assert!(pod.log().wait_for(source, "hold started", LONG).is_some());
            assert_eq!(pod.call(End::Client, "GET", "10.9.0.2:8080", "/").unwrap(), 200);
        }
        assert_eq!(pod.sidecar().wait(LONG).unwrap().status, Status::Code(0));
        assert!(began.elapsed() >= TIMEOUT);
        assert!(pod.application().unwrap().exit().is_none());
        let lines: Vec<_> = pod.log().lines().into_iter().filter(|line| line.source == source).collect();
        let end =
            lines.iter().position(|line| line.text.contains("WARN hold released reason=timeout")).unwrap();
        assert!(lines[end + 1].text.contains(ALONE), "{}", lines[end + 1].text);
        assert!(
            lines[end + 2].text.contains("listener tcp 0.0.0.0:8080 uid 1000"),
            "{}",
            lines[end + 2].text
        );
    }
}

#[test]
fn an_application_that_stops_but_slowly_is_not_taken_for_one_that_was_not_stopped() {
    let pod = Pod::builder()
        .program(outlast(), "outlast")
        .sidecar(RUN)
        .env("TERMINATION_DRAIN_DURATION_SECONDS", "1")
        .env("OUTLAST_TIMEOUT", "6s")
        .application(&["--listen", "0.0.0.0:8080", "--listen", "127.0.0.1:8081", "--serve-more", "1s"])
        .start()
        .unwrap();
    // Its listeners close, and this answer keeps it.
    let load = pod.load("http://10.9.0.2:8080/delay?ms=15000", pod::Pace::PerSecond(10));
    assert!(load.wait_started(10, LONG));
    load.hear_at(Instant::now());
    pod.application().unwrap().signal(Signal::SIGTERM);
    pod.sidecar().signal(Signal::SIGTERM);
    assert!(pod.sidecar().wait(LONG).is_some());
    assert!(pod.log().find("sidecar", "hold released reason=timeout").is_some());
    assert!(pod.log().find("sidecar", ALONE).is_none());
    drop(pod);
    load.finish();
}
