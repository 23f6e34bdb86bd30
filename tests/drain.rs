//! What outlast says to the proxy during and after a hold, with a real Envoy: drain, fast exit, the end of a Job, a plain
//! Envoy without pilot-agent, and a native sidecar's hook.
//!
//! Needs root, Envoy and the static binary: `scripts/test` has all three. The figures of docs/limits.md and
//! docs/fast-exit.md are what these tests print: `cargo test --test drain -- --nocapture`.

use pod::outlast;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pod::envoy::Bootstrap;
use pod::{Builder, End, Load, Pace, Pod, Request, Status, StopPlan, StopReport};

const SECOND: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(60);
/// Longest wait for something that is certain to come; only a failure gets there.
const LONG: Duration = Duration::from_secs(60);
/// What pilot-agent waits by itself, and so the least that a stop takes which does not skip it.
const AGENTS_DRAIN: f64 = 5.0;
const AGENT: [&str; 3] = ["pilot-agent", "proxy", "sidecar"];

/// pilot-agent under `outlast run` with flags.
fn run(flags: &[&str]) -> Builder {
    let argv = [&["outlast", "run"], flags, &["--"], &AGENT].concat();
    Pod::builder().sidecar(&argv).program(outlast(), "outlast").env("OUTLAST_GRACE_PERIOD", "60s")
}

/// Seconds from the release to the sidecar's exit: what comes on top of the hold.
fn after_release(pod: &Pod, report: &StopReport) -> f64 {
    let released = pod.log().find("sidecar", "hold released reason=clear").expect("released, and clear");
    report.sidecar.exit.at.saturating_duration_since(released.at).as_secs_f64()
}

/// When the application was told to stop.
fn signalled(report: &StopReport) -> Instant {
    report.application.as_ref().expect("an application").signalled
}

fn assert_clean(report: &StopReport) {
    for container in [Some(&report.sidecar), report.application.as_ref()].into_iter().flatten() {
        assert!(!container.killed, "SIGKILL was needed: {report:?}");
        assert_eq!(container.exit.status, Status::Code(0), "{report:?}");
    }
}

fn failed(requests: &[Request]) -> Vec<&Request> {
    requests.iter().filter(|request| request.result.is_err()).collect()
}

// --- fast exit ---

/// Bytes that are on their way when the application is gone. Each test stops a Pod and says how many were lost.
///
/// With --fast-exit none may be. The control, a hold for listeners alone whose release kills Envoy at once, must lose
/// some: so the bytes were in danger.
macro_rules! bytes_on_their_way {
    ($($(#[$doc:meta])* fn $name:ident($builder:ident) $body:block)*) => {$(
        $(#[$doc])*
        mod $name {
            use super::*;

            fn test($builder: Builder) -> (Pod, StopReport, usize) $body

            #[test]
            fn fast_exit_loses_none() {
                let (pod, report, lost) = test(run(&["--fast-exit"]));
                assert_eq!(lost, 0, "bytes lost");
                assert_clean(&report);
                let after = after_release(&pod, &report);
                println!(
                    "{}: nothing lost, {:.2} s after the application, {after:.2} s after the release",
                    stringify!($name),
                    report.outlived().unwrap()
                );
                assert!(after < AGENTS_DRAIN - 1.0, "pilot-agent's drain was not skipped: {after}");
            }

            #[test]
            fn killed_without_listeners_envoy_loses_some() {
                let (_pod, _, lost) =
                    test(run(&["--hold=listeners"]).env("TERMINATION_DRAIN_DURATION_SECONDS", "0"));
                println!("{}: the control lost {lost} bytes", stringify!($name));
                assert!(lost > 0, "nothing was in danger");
            }
        }
    )*};
}

/// An application that is still there when the hold begins, and then stops as soon as it can.
const BRIEF: [&str; 4] = ["--listen", "0.0.0.0:8080", "--serve-more", "2s"];

/// A client that reads `bytes` at `rate` a second, from an application that stops as soon as it has written them.
fn slow_client(builder: Builder, bytes: usize, rate: u32) -> (Pod, StopReport, usize) {
    let pod = builder.application(&BRIEF).start().unwrap();
    let reader = pod.slow_reader(&format!("http://10.9.0.2:8080/bytes?n={bytes}"), rate);
    let report = pod.stop(&StopPlan::new(GRACE));
    let lost = reader.missing(bytes);
    (pod, report, lost)
}

const RECORD: usize = "the record\n".len();

bytes_on_their_way! {
    fn slow_client_of_2_mb(builder) {
        slow_client(builder, 2_000_000, 256 * 1024)
    }

    /// More than every buffer between the application and the client together.
    fn slow_client_of_64_mb(builder) {
        slow_client(builder, 64 * 1024 * 1024, 6 * 1024 * 1024)
    }

    fn upstream_whose_syn_ack_comes_after_2_s(builder) {
        let pod = builder
            .application(&[&BRIEF[..], &["--record", "10.9.0.1:9100"]].concat())
            .start()
            .unwrap();
        let upstream = pod.tcp_upstream(9100).unwrap();
        pod.drop_syns(9100, 2).unwrap();
        let report = pod.stop(&StopPlan::new(GRACE));
        // The Pod's network is gone: nothing comes any more.
        let lost = RECORD - upstream.received(RECORD, SECOND).len();
        (pod, report, lost)
    }

    fn upstream_whose_server_hello_comes_after_2_s(builder) {
        let pod = builder
            .env("POD_TLS_PORT", "9443")
            .application(&[&BRIEF[..], &["--record", "10.9.0.1:9443"]].concat())
            .start()
            .unwrap();
        let upstream = pod.tls_upstream(9443, 2 * SECOND).unwrap();
        let report = pod.stop(&StopPlan::new(GRACE));
        let lost = RECORD - upstream.received(RECORD, SECOND).len();
        (pod, report, lost)
    }

    /// A record that Envoy has not even accepted when the application is gone.
    fn envoy_that_is_stopped_for_2_s(builder) {
        let pod = builder.application(&[&BRIEF[..], &["--record", "10.9.0.1:9100"]].concat()).start().unwrap();
        let upstream = pod.tcp_upstream(9100).unwrap();
        let envoys = pod.sidecar().others("envoy");
        let signal_all = |signal| {
            for pid in &envoys {
                // The control's Envoy may be gone already.
                let _ = kill(Pid::from_raw(*pid), signal);
            }
        };
        let report = thread::scope(|scope| {
            let stop = scope.spawn(|| pod.stop(&StopPlan::new(GRACE)));
            assert!(pod.log().wait_for("sidecar", "hold started", LONG).is_some());
            signal_all(Signal::SIGSTOP);
            pod.application().unwrap().wait(LONG).expect("the application's end");
            // Ten times the settle time.
            thread::sleep(2 * SECOND);
            signal_all(Signal::SIGCONT);
            stop.join().unwrap()
        });
        let lost = RECORD - upstream.received(RECORD, SECOND).len();
        (pod, report, lost)
    }

    /// It has to make a TLS handshake and to pass on 96 MB when the application stops.
    fn envoy_with_a_twentieth_of_a_cpu(builder) {
        const ANSWER: usize = 24 * 1024 * 1024;
        let pod = builder
            .env("POD_TLS_PORT", "9443")
            .application(&["--listen", "0.0.0.0:8080", "--serve-more", "0.5s", "--record", "10.9.0.1:9443"])
            .start()
            .unwrap();
        let upstream = pod.tls_upstream(9443, Duration::ZERO).unwrap();
        let throttle = pod.throttle_envoy(5).unwrap();
        // As fast as they can.
        let url = format!("http://10.9.0.2:8080/bytes?n={ANSWER}");
        let readers = [(); 4].map(|()| pod.slow_reader(&url, u32::MAX));
        let report = pod.stop(&StopPlan::new(GRACE));
        drop(throttle);
        let missing = readers.map(|reader| reader.missing(ANSWER));
        let lost = RECORD - upstream.received(RECORD, SECOND).len() + missing.iter().sum::<usize>();
        (pod, report, lost)
    }
}

#[test]
fn fast_exit_ends_the_proxy_right_after_the_application() {
    let pod = run(&["--fast-exit"])
        .application(&[
            "--listen",
            "0.0.0.0:8080",
            "--serve-more",
            "2s",
            "--last-call",
            "http://10.9.0.1:9000/last",
        ])
        .start()
        .unwrap();
    let upstream = pod.upstream(9000).unwrap();
    let load = pod.load("http://10.9.0.2:8080/delay?ms=4000", Pace::PerSecond(40));
    assert!(load.wait_started(10, LONG));
    load.hear_at(Instant::now() + SECOND);
    let report = pod.stop(&StopPlan::new(GRACE));
    let requests = load.finish();
    assert!(failed(&requests).is_empty(), "{:?}", failed(&requests)[0]);
    assert_eq!(upstream.calls().len(), 1, "the last call");
    assert_clean(&report);
    let tail = report.outlived().unwrap();
    println!("fast exit: the proxy ended {tail:.3} s after the application");
    assert!((0.0..AGENTS_DRAIN - 1.0).contains(&tail), "{tail}");
}

#[test]
fn fast_exit_loses_no_line_of_envoys_access_log() {
    // Envoy writes them once a second, as Istio sets it; SIGKILL loses what is left.
    let pod = run(&["--fast-exit"])
        .env("POD_ACCESS_LOG", "true")
        .application(&["--listen", "0.0.0.0:8080", "--serve-more", "2s"])
        .start()
        .unwrap();
    let load = pod.load("http://10.9.0.2:8080/delay?ms=50", Pace::PerSecond(40));
    assert!(load.wait_started(10, LONG));
    load.hear_at(Instant::now() + Duration::from_millis(1900));
    let report = pod.stop(&StopPlan::new(GRACE));
    let requests = load.finish();
    assert!(failed(&requests).is_empty(), "{:?}", failed(&requests)[0]);
    let lines = pod.log().lines().iter().filter(|line| line.text.contains("GET /delay")).count();
    assert_eq!(lines, requests.len(), "lines of the access log");
    assert_clean(&report);
    assert!(after_release(&pod, &report) < AGENTS_DRAIN - 1.0, "{report:?}");
}

#[test]
fn before_istio_1_21_fast_exit_falls_back_to_the_plain_signal() {
    let pod = run(&["--fast-exit"])
        .env("POD_WITHOUT_DRAIN", "true")
        .application(&["--listen", "0.0.0.0:8080", "--serve-more", "1s"])
        .start()
        .unwrap();
    let report = pod.stop(&StopPlan::new(GRACE));
    assert_clean(&report);
    assert!(pod.log().find("sidecar", "status 404").is_some(), "not said");
    after_release(&pod, &report);
    assert!(report.outlived().unwrap() > AGENTS_DRAIN, "{report:?}");
}

#[test]
fn an_agent_that_hangs_or_is_gone_delays_the_signal_within_bounds() {
    for refuse in [false, true] {
        let pod = run(&["--fast-exit"])
            .env("TERMINATION_DRAIN_DURATION_SECONDS", "1")
            .application(&["--listen", "0.0.0.0:8080", "--serve-more", "1s"])
            .start()
            .unwrap();
        pod.wall_off(15020, refuse).unwrap();
        let report = pod.stop(&StopPlan::new(GRACE));
        assert_clean(&report);
        assert!(pod.log().find("sidecar", "cannot skip pilot-agent's own drain").is_some(), "not said");
        assert!(after_release(&pod, &report) < 20.0, "{report:?}");
    }
}

#[test]
fn where_no_application_was_seen_pilot_agent_drains() {
    // A gateway: its requests are nobody's in this Pod.
    let pod = run(&["--fast-exit"]).start().unwrap();
    let report = pod.stop(&StopPlan::new(GRACE));
    after_release(&pod, &report);
    assert!(report.sidecar.exit.at - report.started > 5 * SECOND, "{report:?}");
    assert_clean(&report);
}

#[test]
fn where_undelivered_bytes_do_not_hold_pilot_agent_drains() {
    let pod = run(&["--fast-exit", "--hold=listeners,connections"])
        .application(&["--listen", "0.0.0.0:8080", "--serve-more", "1s"])
        .start()
        .unwrap();
    let report = pod.stop(&StopPlan::new(GRACE));
    after_release(&pod, &report);
    assert!(report.outlived().unwrap() > AGENTS_DRAIN, "{report:?}");
    assert_clean(&report);
}

// --- drain ---

/// Stops a Pod with a `--drain` of half a second and an application that serves 4 s more. Twenty keep-alive clients
/// never hear of it, others open new connections until shortly before the end.
fn drain(builder: Builder, plan: &StopPlan, source: &str, what: &str) -> (usize, usize) {
    let pod = builder.application(&["--listen", "0.0.0.0:8080", "--serve-more", "4s"]).start().unwrap();
    let kept = pod.load("http://10.9.0.2:8080/", Pace::KeepAlive(20));
    let opened = pod.load("http://10.9.0.2:8080/", Pace::PerSecond(40));
    assert!(kept.wait_started(100, LONG) && opened.wait_started(10, LONG));
    opened.hear_at(Instant::now() + 3 * SECOND);
    let report = pod.stop(plan);
    let (kept, opened) = (kept.finish(), opened.finish());
    assert!(failed(&opened).is_empty(), "new connections were refused: {:?}", failed(&opened)[0]);
    assert_clean(&report);
    let drains = pod.log().find(source, "Envoy drains").expect("told to drain").at;
    // A line may reach this test late, so that it stands for the latest time. What ends later than this has met the
    // application's end; and Envoy's workers hear of a drain one after the other.
    let closed = signalled(&report) + 4 * SECOND;
    let during: Vec<_> =
        kept.iter().filter(|r| r.started > drains + SECOND / 4 && r.ended < closed).collect();
    let early = report.started + SECOND / 2;
    let before = kept.iter().filter(|r| r.ended < early && r.close).count();
    assert_eq!(before, 0, "asked to leave before the delay");
    assert!(during.iter().all(|r| r.result.is_ok()), "lost during the drain");
    let (asked, all) = (during.iter().filter(|r| r.close).count(), during.len());
    println!(
        "drain, {what}: {asked} of {all} responses to 20 keep-alive clients in {:.1} s asked to leave",
        closed.saturating_duration_since(drains).as_secs_f64() - 0.25
    );
    assert!(all >= 50, "only {all} requests");
    (asked, all)
}

#[test]
fn drain_through_run_asks_all_clients_to_leave_and_goes_on_accepting() {
    let (asked, all) = drain(run(&["--drain=500ms"]), &StopPlan::new(GRACE), "sidecar", "run, immediate");
    assert_eq!(asked, all);
}

#[test]
fn drain_through_prestop_asks_all_clients_to_leave_and_goes_on_accepting() {
    let builder = Pod::builder().program(outlast(), "outlast").env("OUTLAST_GRACE_PERIOD", "60s");
    let plan = StopPlan::new(GRACE).hook(&["outlast", "prestop", "--drain=500ms"]);
    let (asked, all) = drain(builder, &plan, "hook", "prestop, immediate");
    assert_eq!(asked, all);
}

/// Envoy before 1.33 drains its outbound listener too (envoy#37873): what it goes on to accept is accepted there as well.
#[test]
fn a_call_of_the_applications_after_the_drain_began_is_passed_on() {
    let call = ["--last-call", "http://10.9.0.1:9000/last"];
    let pod = run(&["--drain=0"])
        .application(&[&["--listen", "0.0.0.0:8080", "--serve-more", "2s"], &call[..]].concat())
        .start()
        .unwrap();
    let upstream = pod.upstream(9000).unwrap();
    let report = pod.stop(&StopPlan::new(GRACE));
    assert!(pod.log().find("sidecar", "Envoy drains").is_some(), "it was not told to drain");
    assert_eq!(upstream.calls().len(), 1, "the last call");
    assert_clean(&report);
}

#[test]
fn envoys_own_drain_strategy_asks_only_some() {
    let builder = run(&["--drain=500ms"]).env("POD_DRAIN_STRATEGY", "gradual");
    let (asked, all) = drain(builder, &StopPlan::new(GRACE), "sidecar", "run, gradual");
    assert!(asked > 0 && asked < all / 2, "{asked} of {all}");
}

#[test]
fn without_drain_keep_alive_clients_stay() {
    let pod = run(&[]).application(&["--listen", "0.0.0.0:8080", "--serve-more", "3s"]).start().unwrap();
    let kept = pod.load("http://10.9.0.2:8080/", Pace::KeepAlive(8));
    assert!(kept.wait_started(40, LONG));
    let report = pod.stop(&StopPlan::new(GRACE));
    let closed = signalled(&report) + 3 * SECOND;
    assert!(kept.finish().iter().filter(|r| r.ended < closed).all(|r| r.result.is_ok() && !r.close));
}

#[test]
fn an_admin_that_hangs_or_refuses_is_told_of_in_the_log_and_never_shortens_the_hold() {
    for (refuse, why) in [(false, "no answer within"), (true, "refused")] {
        let pod = run(&["--drain=0", "--fast-exit"])
            .application(&["--listen", "0.0.0.0:8080", "--serve-more", "10s"])
            .start()
            .unwrap();
        pod.wall_off(15000, refuse).unwrap();
        let load = pod.load("http://10.9.0.2:8080/delay?ms=50", Pace::PerSecond(20));
        assert!(load.wait_started(10, LONG));
        load.hear_at(Instant::now() + 8 * SECOND);
        let report = pod.stop(&StopPlan::new(GRACE));
        let requests = load.finish();
        assert!(failed(&requests).is_empty(), "{:?}", failed(&requests)[0]);
        assert_clean(&report);
        after_release(&pod, &report);
        let tries: Vec<_> =
            pod.log().lines().into_iter().filter(|l| l.text.contains("cannot tell Envoy to drain")).collect();
        assert_eq!(tries.len(), 5, "{tries:?}");
        assert!(tries.iter().all(|line| line.text.contains(why)), "{tries:?}");
    }
}

// --- a plain Envoy ---

fn plain_envoy(before: &[&str]) -> Builder {
    let config = Bootstrap { alone: true, ..Bootstrap::default() }.config().to_string();
    let envoy = ["envoy", "--config-yaml", &config, "--disable-hot-restart", "--log-level", "warning"];
    let strategy = ["--concurrency", "2", "--drain-strategy", "immediate"];
    Pod::builder().sidecar(&[before, &envoy, &strategy].concat()).program(outlast(), "outlast")
}

/// Scrapers of 15090 and probes of 15021, on kept-alive connections, that go on until the end.
fn scrapers(pod: &Pod) -> Vec<Load> {
    let urls = ["http://10.9.0.2:15090/stats/prometheus", "http://10.9.0.2:15021/healthz/ready"];
    let loads = urls.map(|url| pod.load(url, Pace::KeepAlive(2)));
    assert!(loads.iter().all(|load| load.wait_started(4, LONG)));
    loads.into()
}

#[test]
fn a_plain_envoy_gets_drain_minimum_wait_and_wait_for_zero() {
    let pod = plain_envoy(&["outlast", "run", "--drain=500ms", "--min-wait=1s", "--fast-exit", "--"])
        .application(&[
            "--listen",
            "0.0.0.0:8080",
            "--serve-more",
            "3s",
            "--last-call",
            "http://10.9.0.1:9000/last",
        ])
        .start()
        .unwrap();
    let upstream = pod.upstream(9000).unwrap();
    let scrapers = scrapers(&pod);
    let long = pod.load("http://10.9.0.2:8080/delay?ms=5000", Pace::PerSecond(20));
    let kept = pod.load("http://10.9.0.2:8080/", Pace::KeepAlive(8));
    assert!(long.wait_started(10, LONG) && kept.wait_started(16, LONG));
    for load in [&long, &kept] {
        load.hear_at(Instant::now() + 2 * SECOND);
    }
    let report = pod.stop(&StopPlan::new(GRACE));
    assert_clean(&report);
    after_release(&pod, &report);
    let tail = report.outlived().unwrap();
    println!("plain Envoy: ended {tail:.3} s after the application, scraped and probed all the time");
    assert!((0.0..AGENTS_DRAIN).contains(&tail), "{tail}");
    let kept = kept.finish();
    assert!(kept.iter().any(|request| request.close), "nobody was asked to leave");
    let requests = [long.finish(), kept].concat();
    assert!(failed(&requests).is_empty(), "{:?}", failed(&requests)[0]);
    assert_eq!(upstream.calls().len(), 1, "the last call");
    for scraper in scrapers {
        assert!(scraper.finish().iter().filter(|r| r.result.is_ok()).count() >= 10);
    }
}

#[test]
fn a_plain_envoy_holds_for_the_minimum_wait_beside_scrapers_alone() {
    let pod = plain_envoy(&["outlast", "run", "--min-wait=2s", "--"]).start().unwrap();
    let scrapers = scrapers(&pod);
    let report = pod.stop(&StopPlan::new(GRACE));
    let held = report.sidecar.exit.at - report.started;
    assert!(held >= 2 * SECOND && held < 15 * SECOND, "{held:?}");
    assert_clean(&report);
    drop(scrapers.into_iter().map(Load::finish).collect::<Vec<_>>());
}

#[test]
fn a_plain_envoy_alone_loses_what_is_in_flight() {
    let pod =
        plain_envoy(&[]).application(&["--listen", "0.0.0.0:8080", "--serve-more", "3s"]).start().unwrap();
    let load = pod.load("http://10.9.0.2:8080/delay?ms=5000", Pace::PerSecond(20));
    assert!(load.wait_started(10, LONG));
    load.hear_at(Instant::now());
    pod.stop(&StopPlan::new(GRACE));
    assert!(!failed(&load.finish()).is_empty());
}

// --- Jobs ---

fn job(sidecar: &[&str], flags: &[&str]) -> Builder {
    let app = [&["outlast", "app"], flags, &["--"]].concat();
    Pod::builder()
        .sidecar(sidecar)
        .program(outlast(), "outlast")
        .wrap_application(outlast(), "outlast", &app)
        .application(&["--job", "3s", "--status", "7"])
}

#[test]
fn a_job_ends_with_its_application_and_keeps_its_status() {
    for sidecar in [&AGENT[..], &["outlast", "run", "--", "pilot-agent", "proxy", "sidecar"]] {
        let pod = job(sidecar, &["--quit=always"]).start().unwrap();
        let application = pod.application().unwrap().wait(LONG).expect("the Job's end");
        let sidecar = pod.sidecar().wait(LONG).expect("the proxy's end");
        let done = pod.log().find("application", "the job is done").expect("done").at;
        let gone = [application.at, sidecar.at].map(|at| at.saturating_duration_since(done).as_secs_f64());
        println!("a Job: both containers gone {:.3} s after it, {:.3} s the proxy's", gone[0], gone[1]);
        assert_eq!((application.status, sidecar.status), (Status::Code(7), Status::Code(0)));
        // Not one of outlast's own limits was reached.
        assert!(gone.iter().all(|seconds| *seconds < 4.0), "{gone:?}");
        assert!(pod.log().find("application", "the proxy is gone").is_some());
    }
}

#[test]
fn without_quit_a_jobs_proxy_lives_on() {
    for flags in [&[][..], &["--quit=on-success"]] {
        let pod = job(&AGENT, flags).start().unwrap();
        let application = pod.application().unwrap().wait(LONG).expect("the Job's end");
        assert_eq!(application.status, Status::Code(7));
        assert!(pod.sidecar().wait(3 * SECOND).is_none());
    }
}

// --- a native sidecar's hook ---

#[test]
fn the_hook_of_a_native_sidecar_tells_pilot_agent_to_drain_and_returns() {
    let pod = Pod::builder()
        .program(outlast(), "outlast")
        .env("TERMINATION_DRAIN_DURATION_SECONDS", "30")
        .application(&["--listen", "0.0.0.0:8080"])
        .start()
        .unwrap();
    let hook = pod.exec(&["outlast", "prestop", "--native-sidecar"], "hook").unwrap();
    assert_eq!(hook.wait(LONG).expect("the hook returns").status, Status::Code(0));
    assert!(pod.log().find("hook", "reason=off").is_some());
    // It goes on accepting, for the application still serves; and a later signal ends it at once.
    let asked = pod.load("http://10.9.0.2:8080/", Pace::KeepAlive(2));
    assert!(asked.wait_started(6, LONG));
    let asked = asked.finish();
    assert!(asked.iter().all(|r| r.result.is_ok()) && asked.iter().any(|r| r.close), "{asked:?}");
    let signalled = Instant::now();
    pod.sidecar().signal(Signal::SIGTERM);
    let exit = pod.sidecar().wait(LONG).expect("the proxy's end");
    assert_eq!(exit.status, Status::Code(0));
    assert!(exit.at - signalled < 20 * SECOND, "it was not told to drain: {:?}", exit.at - signalled);
}

#[test]
fn the_hook_of_a_native_sidecar_returns_0_whatever_pilot_agent_says() {
    let pod = Pod::builder().program(outlast(), "outlast").env("POD_WITHOUT_DRAIN", "true").start().unwrap();
    let hook = |why: &str| {
        let hook = pod.exec(&["outlast", "prestop", "--native-sidecar"], "hook").unwrap();
        assert_eq!(hook.wait(LONG).expect("the hook returns").status, Status::Code(0));
        assert!(pod.log().find("hook", why).is_some(), "{why} is not said");
    };
    hook("status 404");
    pod.wall_off(15020, false).unwrap();
    hook("no answer within");
    assert_eq!(pod.call(End::Pod, "GET", "127.0.0.1:15021", "/healthz/ready").unwrap_or(503), 503);
}
