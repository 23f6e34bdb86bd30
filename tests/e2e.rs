//! A real Envoy outlasts a real application, through `outlast run` and through `outlast prestop`.
//!
//! Needs root, Envoy and the static binary: `scripts/test` has all three.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pod::{Builder, ContainerReport, Load, Pace, Pod, Request, Status, StopPlan, StopReport};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(30);
/// Longest wait for something that is certain to come; only a failure gets there.
const LONG: Duration = Duration::from_secs(30);
const LAST_CALL: [&str; 2] = ["--last-call", "http://10.9.0.1:9000/last"];

/// Which of outlast's commands keeps the proxy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Through {
    Run,
    Prestop,
}

/// Each test once through `run` and once through `prestop`.
macro_rules! through_both {
    ($($(#[$doc:meta])* fn $name:ident($through:ident) $body:block)*) => {$(
        $(#[$doc])*
        mod $name {
            use super::*;

            fn test($through: Through) $body

            #[test]
            fn through_run() {
                test(Through::Run);
            }

            #[test]
            fn through_prestop() {
                test(Through::Prestop);
            }
        }
    )*};
}

impl Through {
    fn pod(self) -> Builder {
        let outlast = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/static/x86_64/outlast");
        assert!(
            outlast.exists(),
            "there is no static binary: scripts/test builds it, scripts/build-static alone"
        );
        let argv: &[&str] = match self {
            Through::Run => &["outlast", "run", "--", "pilot-agent", "proxy", "sidecar"],
            Through::Prestop => &["pilot-agent", "proxy", "sidecar"],
        };
        // One second instead of five: nothing but the hold shall keep the proxy.
        Pod::builder()
            .sidecar(argv)
            .program(outlast, "outlast")
            .env("TERMINATION_DRAIN_DURATION_SECONDS", "1")
    }

    fn plan(self, grace: Duration) -> StopPlan {
        let plan = StopPlan::new(grace);
        if self == Through::Prestop { plan.hook(&["outlast", "prestop"]) } else { plan }
    }

    /// Whose lines the hold's are.
    fn source(self) -> &'static str {
        match self {
            Through::Run => "sidecar",
            Through::Prestop => "hook",
        }
    }

    /// The hold was released for this reason and for no other.
    fn assert_released(self, pod: &Pod, reason: &str) {
        let lines = pod.log().lines();
        let released: Vec<_> =
            lines.iter().filter(|l| l.source == self.source() && l.text.contains("hold released")).collect();
        assert_eq!(released.len(), 1, "releases: {released:?}");
        assert!(released[0].text.contains(&format!("reason={reason}")), "{}", released[0].text);
    }

    /// Stops the Pod, and does `f` once the hold has begun.
    fn during_hold<T: Send>(self, pod: &Pod, plan: &StopPlan, f: impl FnOnce() -> T) -> (StopReport, T) {
        thread::scope(|s| {
            let stop = s.spawn(|| pod.stop(plan));
            let begun = pod.log().wait_for(self.source(), "hold started", LONG);
            assert!(begun.is_some(), "no hold has begun");
            let done = f();
            (stop.join().unwrap(), done)
        })
    }

    /// Stops a Pod whose clients hear of it after `hear`: nothing fails, the proxy goes last and by itself.
    fn assert_stops_without_loss(self, pod: &Pod, loads: Vec<Load>, hear: Duration) -> StopReport {
        let upstream = pod.upstream(9000).unwrap();
        for load in &loads {
            assert!(load.wait_started(10, LONG), "the clients do not get going");
            load.hear_at(Instant::now() + hear);
        }
        let report = pod.stop(&self.plan(GRACE));
        assert_lossless(&loads.into_iter().flat_map(Load::finish).collect::<Vec<_>>());
        assert_eq!(upstream.calls().len(), 1, "the last call");
        self.assert_outlived(pod, &report);
        report
    }

    /// The proxy was there longer than the application, and both ended by themselves.
    fn assert_outlived(self, pod: &Pod, report: &StopReport) {
        self.assert_released(pod, "clear");
        self.assert_hook(report, 0);
        assert_clean(&report.sidecar);
        if let Some(application) = &report.application {
            assert_clean(application);
            assert!(report.outlived().unwrap() > 0.0, "the proxy went first: {report:?}");
        }
    }

    fn assert_hook(self, report: &StopReport, code: i32) {
        let expected = (self == Through::Prestop).then_some(Status::Code(code));
        assert_eq!(report.sidecar.hook.map(|hook| hook.status), expected, "the hook's status");
    }
}

fn assert_clean(container: &ContainerReport) {
    assert!(!container.killed, "SIGKILL was needed: {container:?}");
    assert_eq!(container.exit.status, Status::Code(0));
}

fn assert_lossless(requests: &[Request]) {
    assert!(requests.len() >= 10, "only {} requests", requests.len());
    let lost: Vec<_> = requests.iter().filter(|r| r.result.is_err()).collect();
    assert!(lost.is_empty(), "{} of {} requests lost, such as {:?}", lost.len(), requests.len(), lost[0]);
}

fn flags<'a>(listen: &[&'a str], rest: &[&'a str]) -> Vec<&'a str> {
    let listen = listen.iter().flat_map(|addr| ["--listen", *addr]);
    listen.chain(rest.iter().copied()).chain(LAST_CALL).collect()
}

through_both! {
    fn polite_server_that_serves_on_and_closes(through) {
        let pod = through.pod().application(&flags(&["0.0.0.0:8080"], &["--serve-more", "3s"])).start().unwrap();
        let load = pod.load("http://10.9.0.2:8080/delay?ms=50", Pace::PerSecond(40));
        through.assert_stops_without_loss(&pod, vec![load], 2 * SECOND);
        // The hook's own stderr reaches no log in a cluster: PID 1's does.
        assert!(pod.log().find("sidecar", "reason=clear").is_some(), "no release in the container's log");
    }

    fn requests_in_flight_long_after_the_listener_has_closed(through) {
        let pod = through.pod().application(&flags(&["0.0.0.0:8080"], &["--serve-more", "2s"])).start().unwrap();
        let load = pod.load("http://10.9.0.2:8080/delay?ms=9000", Pace::PerSecond(40));
        through.assert_stops_without_loss(&pod, vec![load], SECOND);
    }

    fn clients_that_hear_of_the_removal_late(through) {
        let pod = through.pod().application(&flags(&["0.0.0.0:8080"], &["--serve-more", "10s"])).start().unwrap();
        let load = pod.load("http://10.9.0.2:8080/delay?ms=50", Pace::PerSecond(40));
        through.assert_stops_without_loss(&pod, vec![load], 8 * SECOND);
    }

    fn server_on_the_v6_wildcard_only(through) {
        let pod = through.pod().application(&flags(&["[::]:8080"], &["--serve-more", "3s"])).start().unwrap();
        let urls = ["http://10.9.0.2:8080/delay?ms=50", "http://[fd00:9::2]:8080/delay?ms=50"];
        let loads = urls.map(|url| pod.load(url, Pace::PerSecond(20)));
        through.assert_stops_without_loss(&pod, loads.into(), 2 * SECOND);
    }

    fn server_on_loopback_only_with_a_second_port(through) {
        let inbound = "8080=127.0.0.1:8080,8081=127.0.0.1:8081";
        let application = flags(&["127.0.0.1:8080", "127.0.0.1:8081"], &["--serve-more", "3s"]);
        let pod = through.pod().env("POD_INBOUND", inbound).application(&application).start().unwrap();
        let urls = ["http://10.9.0.2:8080/delay?ms=50", "http://10.9.0.2:8081/delay?ms=50"];
        let loads = urls.map(|url| pod.load(url, Pace::PerSecond(20)));
        through.assert_stops_without_loss(&pod, loads.into(), 2 * SECOND);
    }

    fn keep_alive_clients_that_hear_of_the_removal(through) {
        let pod = through.pod().application(&flags(&["0.0.0.0:8080"], &["--serve-more", "3s"])).start().unwrap();
        // Eight clients make five requests a second each.
        let load = pod.load("http://10.9.0.2:8080/", Pace::KeepAlive(8));
        through.assert_stops_without_loss(&pod, vec![load], 2 * SECOND);
    }

    fn slow_client_of_an_application_that_is_gone(through) {
        let grace = 60 * SECOND;
        let application = flags(&["0.0.0.0:8080"], &[]);
        let pod = through.pod().env("OUTLAST_GRACE_PERIOD", "60s").application(&application).start().unwrap();
        let upstream = pod.upstream(9000).unwrap();
        let reader = pod.slow_reader("http://10.9.0.2:8080/bytes?n=2000000", 64 * 1024);
        let report = pod.stop(&through.plan(grace));
        assert_eq!(reader.finish().result, Ok(2_000_000), "bytes of the answer");
        assert_eq!(upstream.calls().len(), 1, "the last call");
        through.assert_outlived(&pod, &report);
        // The bytes alone held: what a client reads in 31 s was left when the application had gone.
        assert!(report.outlived().unwrap() > 15.0, "{report:?}");
    }

    fn record_behind_a_tls_handshake_that_takes_long(through) {
        let pod = through
            .pod()
            .env("POD_TLS_PORT", "9443")
            // Not one second of pilot-agent's own, in which the handshake might end.
            .env("TERMINATION_DRAIN_DURATION_SECONDS", "0")
            .application(&["--listen", "0.0.0.0:8080", "--record", "10.9.0.1:9443"])
            .start()
            .unwrap();
        let upstream = pod.tls_upstream(9443, 2 * SECOND).unwrap();
        let report = pod.stop(&through.plan(GRACE));
        assert_eq!(String::from_utf8_lossy(&upstream.received(11, LONG)), "the record\n");
        through.assert_outlived(&pod, &report);
    }

    fn worker_without_a_listener(through) {
        let builder = through.pod().application(&["--worker", "10.9.0.1:9000", "--serve-more", "10s"]);
        let pod = builder.start_unready().unwrap();
        // The worker calls as soon as it can: it tries until the proxy and the upstream are there.
        let upstream = pod.upstream(9000).unwrap();
        pod.await_ready().unwrap();
        let report = pod.stop(&through.plan(GRACE));
        let calls: Vec<_> = upstream.calls().into_iter().map(|(_, path)| path).collect();
        assert_eq!(calls, ["/first", "/last"]);
        through.assert_outlived(&pod, &report);
    }

    fn no_application_at_all(through) {
        let pod = through.pod().start().unwrap();
        let report = pod.stop(&through.plan(GRACE));
        through.assert_outlived(&pod, &report);
        assert!(report.sidecar.exit.at - report.started < 15 * SECOND, "an empty Pod held the proxy: {report:?}");
    }

    fn application_that_never_stops(through) {
        let pod = through
            .pod()
            .env("OUTLAST_GRACE_PERIOD", "14s")
            .application(&["--listen", "0.0.0.0:8080", "--never-stop"])
            .start()
            .unwrap();
        let report = pod.stop(&through.plan(14 * SECOND));
        through.assert_released(&pod, "timeout");
        through.assert_hook(&report, 124);
        // After the release, and not only in the list at the hold's start.
        let lines = pod.log().lines();
        let mut end = lines.iter().skip_while(|l| !l.text.contains("reason=timeout"));
        assert!(end.any(|l| l.source == through.source() && l.text.contains(":8080")), "the holder is not named");
        assert_clean(&report.sidecar);
        assert!(report.application.unwrap().killed);
    }

    fn client_that_vanishes_without_a_fin(through) {
        let pod = through.pod().application(&["--listen", "0.0.0.0:8080"]).start().unwrap();
        let reader = pod.slow_reader("http://10.9.0.2:8080/bytes?n=600000", 16 * 1024);
        pod.silence(reader.port).unwrap();
        let report = pod.stop(&through.plan(GRACE));
        through.assert_outlived(&pod, &report);
        // Five seconds of stalling and the settle time, but not the timeout of 23 s.
        let held = report.sidecar.exit.at - report.started;
        assert!(held > 4 * SECOND, "the bytes did not hold at all: {held:?}");
        assert!(held < 18 * SECOND, "stalled bytes held too long: {held:?}");
        assert!(reader.finish().result.is_err());
    }

    fn envoy_killed_during_the_hold(through) {
        let pod = through.pod().application(&["--listen", "0.0.0.0:8080", "--serve-more", "8s"]).start().unwrap();
        let kill_envoy = || {
            let envoy = pod.sidecar().others("envoy");
            assert_eq!(envoy.len(), 1);
            kill(Pid::from_raw(envoy[0]), Signal::SIGKILL).unwrap();
        };
        let (report, ()) = through.during_hold(&pod, &through.plan(GRACE), kill_envoy);
        // pilot-agent exits 0 with its Envoy.
        assert_clean(&report.sidecar);
        assert!(report.outlived().unwrap() < 0.0, "a hold without a proxy: {report:?}");
        // A hook ends with its container's PID 1, and cannot always say what it saw.
        if through == Through::Run {
            through.assert_released(&pod, "proxy-gone");
        }
    }

    fn sigterm_right_after_the_start(through) {
        let builder = through.pod().application(&flags(&["0.0.0.0:8080"], &["--serve-more", "3s"]));
        let pod = builder.start_unready().unwrap();
        let upstream = pod.upstream(9000).unwrap();
        assert!(pod.log().wait_for("application", "ready", LONG).is_some());
        // The kernel drops a signal for a PID 1 that does not handle it yet, and no init can change that.
        while !pod.sidecar().handles(Signal::SIGTERM) {
            assert!(pod.sidecar().exit().is_none(), "the sidecar has ended");
            thread::yield_now();
        }
        let report = pod.stop(&through.plan(GRACE));
        assert_eq!(upstream.calls().len(), 1, "the last call");
        through.assert_outlived(&pod, &report);
    }

    fn repeated_sigterm(through) {
        let pod = through.pod().application(&flags(&["0.0.0.0:8080"], &["--serve-more", "3s"])).start().unwrap();
        let upstream = pod.upstream(9000).unwrap();
        let load = pod.load("http://10.9.0.2:8080/delay?ms=50", Pace::PerSecond(40));
        assert!(load.wait_started(10, LONG));
        load.hear_at(Instant::now() + 2 * SECOND);
        let report = pod.stop(&StopPlan { repeat: Some(SECOND / 2), ..through.plan(GRACE) });
        assert_lossless(&load.finish());
        assert_eq!(upstream.calls().len(), 1, "the last call");
        through.assert_outlived(&pod, &report);
    }

    fn sigint_during_the_hold(through) {
        let pod = through.pod().application(&["--listen", "0.0.0.0:8080", "--serve-more", "8s"]).start().unwrap();
        let interrupt = || {
            let outlast = pod.sidecar().others("outlast");
            assert_eq!(outlast.len(), 1);
            kill(Pid::from_raw(outlast[0]), Signal::SIGINT).unwrap();
        };
        let (report, ()) = through.during_hold(&pod, &through.plan(GRACE), interrupt);
        through.assert_released(&pod, "signal");
        through.assert_hook(&report, 130);
        assert_clean(&report.sidecar);
        assert!(report.outlived().unwrap() < 0.0, "the signal did not end the hold: {report:?}");
    }
}

/// The fixture sees what there is to see: these lose without outlast.
mod control_without_outlast {
    use super::*;

    #[test]
    fn loses_requests_in_flight_and_the_last_call() {
        let builder = Pod::builder().application(&flags(&["0.0.0.0:8080"], &["--serve-more", "2s"]));
        let pod = builder.start().unwrap();
        let upstream = pod.upstream(9000).unwrap();
        let load = pod.load("http://10.9.0.2:8080/delay?ms=9000", Pace::PerSecond(40));
        assert!(load.wait_started(10, LONG));
        load.hear_at(Instant::now() + SECOND);
        let report = pod.stop(&StopPlan::new(GRACE));
        assert!(load.finish().iter().any(|request| request.result.is_err()));
        assert_eq!(upstream.calls().len(), 0);
        assert!(report.outlived().unwrap() < 0.0);
    }

    #[test]
    fn loses_bytes_of_a_slow_client() {
        let pod = Pod::builder().application(&["--listen", "0.0.0.0:8080"]).start().unwrap();
        let reader = pod.slow_reader("http://10.9.0.2:8080/bytes?n=2000000", 64 * 1024);
        pod.stop(&StopPlan::new(GRACE));
        let cut = reader.finish().result.expect_err("all bytes arrived");
        assert!(cut.contains("cut"), "{cut}");
    }

    #[test]
    fn loses_nothing_after_a_long_enough_sleep() {
        let builder = Pod::builder().application(&flags(&["0.0.0.0:8080"], &["--serve-more", "2s"]));
        let pod = builder.start().unwrap();
        let upstream = pod.upstream(9000).unwrap();
        let load = pod.load("http://10.9.0.2:8080/delay?ms=9000", Pace::PerSecond(40));
        assert!(load.wait_started(10, LONG));
        load.hear_at(Instant::now() + SECOND);
        let report = pod.stop(&StopPlan::new(GRACE).hook(&["sleep", "15"]));
        assert_lossless(&load.finish());
        assert_eq!(upstream.calls().len(), 1);
        assert!(report.outlived().unwrap() > 0.0);
    }
}
