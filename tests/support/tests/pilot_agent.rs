//! The stand-in for pilot-agent does what the real one does.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pod::{Builder, End, Pace, Pod, Status};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(30);

fn pod() -> Builder {
    // Longer than anything else here, so that who waits for the drain is seen to wait.
    Pod::builder().env("TERMINATION_DRAIN_DURATION_SECONDS", "8")
}

/// The status of the sidecar and the time until its exit.
fn exit(pod: &Pod) -> (Status, Duration) {
    let begun = Instant::now();
    let exit = pod.sidecar().wait(LONG).expect("the sidecar ends");
    (exit.status, exit.at.saturating_duration_since(begun))
}

#[test]
fn quits_only_when_asked_from_loopback_and_by_post() {
    let pod = pod().start().unwrap();
    for path in ["/quitquitquit", "/drain"] {
        assert_eq!(pod.call(End::Client, "POST", "10.9.0.2:15020", path).unwrap(), 403);
        assert_eq!(pod.call(End::Client, "POST", "[fd00:9::2]:15020", path).unwrap(), 403);
        assert_eq!(pod.call(End::Pod, "GET", "127.0.0.1:15020", path).unwrap(), 405);
    }
    assert!(pod.sidecar().exit().is_none());
    assert_eq!(pod.call(End::Pod, "POST", "127.0.0.1:15020", "/quitquitquit").unwrap(), 200);
    let (status, after) = exit(&pod);
    assert_eq!(status, Status::Code(0));
    assert!(after < Duration::from_secs(8), "quitquitquit skips the drain: {after:?}");
}

#[test]
fn drains_before_it_stops_and_swallows_a_second_signal() {
    let pod = pod().start().unwrap();
    pod.sidecar().signal(Signal::SIGTERM);
    assert!(pod.log().wait_for("sidecar", "draining", LONG).is_some());
    pod.sidecar().signal(Signal::SIGTERM);
    pod.sidecar().signal(Signal::SIGINT);
    let (status, after) = exit(&pod);
    assert_eq!(status, Status::Code(0));
    assert!(after > Duration::from_secs(6), "a second signal cut the drain short: {after:?}");
}

#[test]
fn stops_at_once_after_drain() {
    let pod = pod().start().unwrap();
    assert_eq!(pod.call(End::Pod, "POST", "[::1]:15020", "/drain").unwrap(), 200);
    pod.sidecar().signal(Signal::SIGTERM);
    let (status, after) = exit(&pod);
    assert_eq!(status, Status::Code(0));
    assert!(after < Duration::from_secs(8), "{after:?}");
}

#[test]
fn exits_0_when_envoy_crashes_and_255_when_it_cannot_start() {
    let pod = pod().start().unwrap();
    let envoy = pod.sidecar().others("envoy");
    assert_eq!((envoy.len(), pod.sidecar().others("pilot-agent").len()), (1, 1));
    kill(Pid::from_raw(envoy[0]), Signal::SIGSEGV).unwrap();
    assert_eq!(exit(&pod).0, Status::Code(0));

    let pod = Pod::builder().sidecar(&["pilot-agent", "gateway"]).start_unready().unwrap();
    assert_eq!(exit(&pod).0, Status::Code(255));
}

#[test]
fn is_restricted_as_a_sidecar_is() {
    let pod = pod().start().unwrap();
    let shell = "id -u; grep -E '^(CapBnd|NoNewPrivs)' /proc/1/status; cat /proc/1/comm; touch /tmp/x || echo read-only; echo said >/proc/1/fd/2";
    let exec = pod.exec(&["sh", "-c", shell], "exec").unwrap();
    assert_eq!(exec.wait(LONG).unwrap().status, Status::Code(0), "{}", pod.log().text());
    for line in ["1337", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "pilot-agent", "read-only"] {
        assert!(pod.log().find("exec", line).is_some(), "{line}\n{}", pod.log().text());
    }
    assert!(pod.log().wait_for("sidecar", "said", LONG).is_some());
}

#[test]
fn exit_on_zero_waits_for_inbound_connections_and_not_for_scrapers() {
    let pod = Pod::builder()
        .env("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true")
        .env("MINIMUM_DRAIN_DURATION", "1")
        .application(&["--listen", "0.0.0.0:8080"])
        .start()
        .unwrap();
    let scraper = pod.load("http://10.9.0.2:15090/stats/prometheus", Pace::KeepAlive(1));
    let long = pod.load("http://10.9.0.2:8080/delay?ms=5000", Pace::PerSecond(4));
    assert!(scraper.wait_started(2, LONG) && long.wait_started(2, LONG));
    long.hear_at(Instant::now());
    pod.sidecar().signal(Signal::SIGTERM);
    assert!(pod.log().wait_for("sidecar", "active connections", LONG).is_some());
    let requests = long.finish();
    assert!(requests.iter().all(|request| request.result.is_ok()), "{requests:?}");
    let (status, _) = exit(&pod);
    assert_eq!(status, Status::Code(0));
    assert!(scraper.finish().iter().any(|request| request.result.is_ok()));
}

#[test]
fn one_before_istio_1_21_knows_no_drain() {
    let pod = pod().env("POD_WITHOUT_DRAIN", "true").start().unwrap();
    assert_eq!(pod.call(End::Pod, "POST", "127.0.0.1:15020", "/drain").unwrap(), 404);
}
