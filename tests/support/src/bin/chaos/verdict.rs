//! Whether a rollout went as it must, by what the fixture saw and not by what outlast says of itself.

use crate::draw::{Client, Draw, Fault, How, Shape, Through};
use crate::rollout::{Loss, Seen};
use pod::{Exit, Line, Status, instant};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How late a thing may be noted on a busy machine.
const SLACK: Duration = Duration::from_secs(2);
/// By so much a client may note Envoy's death before Envoy's own line about it is read.
const NOTED: Duration = Duration::from_millis(500);
/// outlast promises fewer lines a hold.
const MOST_LINES: usize = 100;
/// Bytes that have not moved for so long hold no longer.
const STALLED: Duration = Duration::from_secs(5);
/// What outlast prints of its durations and times is cut to milliseconds.
const PRINTED: Duration = Duration::from_millis(1);

/// What is wrong, and what goes into the figures.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) wrong: Vec<String>,
    pub(crate) reasons: Vec<String>,
    /// How long after its timeout a hold ended that ended so.
    pub(crate) overshoot: Duration,
}

/// A line of outlast's about the end of a hold.
struct Release {
    reason: String,
    after: Duration,
    /// By outlast's own clock, to the millisecond.
    said: Instant,
    arrived: Instant,
}

/// Judges all but the losses.
pub(crate) fn judge(draw: &Draw, seen: &Seen) -> Verdict {
    let mut verdict = Verdict::default();
    let mut wrong = Vec::new();
    judge_ends(draw, seen, &mut wrong);
    let holds: &[(&str, Option<Exit>)] = match draw.through {
        Through::Run | Through::Both => &[("sidecar", None)],
        Through::Prestop => &[("hook", seen.report.sidecar.hook), ("hook again", seen.report.sidecar.again)],
    };
    let twice = draw.has(|fault| matches!(fault, Fault::HookTwice { .. }));
    for (source, hook) in holds.iter().filter(|(source, _)| *source != "hook again" || twice) {
        match judge_hold(draw, seen, source, &mut wrong) {
            Some(release) => {
                if draw.through == Through::Prestop {
                    judge_status(draw, source, &release.reason, *hook, &mut wrong);
                }
                if release.reason == "timeout" {
                    verdict.overshoot = verdict.overshoot.max(release.after.saturating_sub(draw.timeout()));
                }
                verdict.reasons.push(release.reason);
            }
            None => verdict.reasons.push("cut short".to_owned()),
        }
    }
    let releases = |of: &dyn Fn(&str) -> bool| {
        let released = |line: &&Line| of(&line.source) && line.text.contains("hold released");
        seen.lines.iter().filter(released).count()
    };
    if draw.through == Through::Prestop && !may_lose_its_container(draw) {
        let (hooks, copies) =
            (releases(&|source| source.starts_with("hook")), releases(&|source| source == "sidecar"));
        if hooks != copies {
            wrong.push(format!("{hooks} releases by hooks, and {copies} in the container's log"));
        }
    }
    if draw.through == Through::Both {
        for (source, hook) in [("hook", seen.report.sidecar.hook), ("hook again", seen.report.sidecar.again)]
        {
            if source == "hook" || twice {
                let killed = hook.is_some_and(|hook| hook.status == Status::Signal(9));
                if !(killed && may_lose_its_container(draw))
                    && hook.map(|hook| hook.status) != Some(Status::Code(0))
                {
                    wrong.push(format!("{source}, which steps back, ended with {hook:?}"));
                }
            }
        }
    }
    if seen.text.contains("panicked") {
        wrong.push("something has panicked".to_owned());
    }
    verdict.wrong = wrong;
    verdict
}

/// How the containers ended.
fn judge_ends(draw: &Draw, seen: &Seen, wrong: &mut Vec<String>) {
    let sidecar = &seen.report.sidecar;
    if sidecar.killed {
        wrong.push("the sidecar needed SIGKILL".to_owned());
    } else if sidecar.exit.status != Status::Code(0) {
        wrong.push(format!("the sidecar ended with {:?}, and pilot-agent with 0", sidecar.exit.status));
    }
    match seen.application() {
        Ok(application) if draw.application.shape != Shape::NeverStops && application.killed => {
            wrong.push("the application needed SIGKILL: the draw gave it too little time".to_owned());
        }
        _ => {}
    }
}

/// Whether the proxy's container may end before the hold does.
fn may_lose_its_container(draw: &Draw) -> bool {
    // Envoy dies of a segmentation fault when it cannot open a socket.
    draw.has(|fault| matches!(fault, Fault::EnvoyKilled { .. } | Fault::Files { who: "envoy", .. }))
}

/// What one hold said of itself. None where it could not say anything: its container ended under it.
fn judge_hold(draw: &Draw, seen: &Seen, source: &str, wrong: &mut Vec<String>) -> Option<Release> {
    let lines: Vec<_> = seen.lines.iter().filter(|line| line.source == source && is_outlasts(line)).collect();
    // A hook that goes with the proxy writes into the sidecar's log as well: one for each hook.
    if lines.len() >= MOST_LINES {
        wrong.push(format!("{source}: {} lines", lines.len()));
    }
    let with =
        |message: &str| lines.iter().filter(|line| line.text.contains(message)).copied().collect::<Vec<_>>();
    let (started, released) = (with("hold started"), with("hold released"));
    let ([started], [released]) = (started.as_slice(), released.as_slice()) else {
        // A hook ends with its container, and there is no hold where that had ended before.
        let cut_short = released.is_empty() && (draw.through == Through::Prestop || started.is_empty());
        if !(cut_short && may_lose_its_container(draw)) {
            wrong.push(format!("{source}: {} holds and {} releases", started.len(), released.len()));
        }
        return None;
    };
    let Some(release) = Release::read(released) else {
        wrong.push(format!("{source}: not a release: {}", released.text));
        return None;
    };
    judge_duration(draw, seen, source, started, &release, wrong);
    let fields = |what: String| format!("{source}: reason={}: {what}", release.reason);
    match release.reason.as_str() {
        "clear" => judge_clear(draw, seen, &release, wrong),
        "timeout" => {
            if release.after < draw.timeout() {
                wrong.push(fields(format!("after {:?}, the timeout is {:?}", release.after, draw.timeout())));
            }
            let over = release.after.saturating_sub(draw.timeout());
            if over > SLACK + longest_pause(draw) {
                wrong.push(fields(format!("{over:?} late")));
            }
            if !had_a_holder(draw, seen, &release) {
                wrong.push(fields("there was nothing to hold for".to_owned()));
            }
        }
        "proxy-gone" => {
            if !may_lose_its_container(draw) {
                wrong.push(fields("nobody took the proxy away".to_owned()));
            }
        }
        "signal" => {
            if !draw.has(|fault| matches!(fault, Fault::Interrupted { .. })) {
                wrong.push(fields("nobody sent one".to_owned()));
            }
        }
        _ => wrong.push(fields("not for this draw".to_owned())),
    }
    if draw.application.shape == Shape::NeverStops
        && !["timeout", "proxy-gone"].contains(&release.reason.as_str())
    {
        wrong.push(fields("the application never stops".to_owned()));
    }
    if draw.has(|fault| matches!(fault, Fault::Interrupted { .. })) && release.reason != "signal" {
        wrong.push(fields("it was interrupted".to_owned()));
    }
    Some(release)
}

/// `after` against the fixture's clock: from the signal or the hook's start to the line's arrival.
fn judge_duration(
    draw: &Draw,
    seen: &Seen,
    source: &str,
    started: &Line,
    release: &Release,
    wrong: &mut Vec<String>,
) {
    let begun = if source == "sidecar" { seen.report.sidecar.signalled } else { seen.report.started };
    let most = release.arrived.duration_since(begun);
    if release.after > most + PRINTED {
        wrong.push(format!("{source}: it says {:?}, and that is more than {most:?}", release.after));
    }
    let least = release.arrived.duration_since(started.at).saturating_sub(SLACK + longest_pause(draw));
    if release.after < least {
        wrong.push(format!("{source}: it says {:?}, and that is less than {least:?}", release.after));
    }
}

/// Released as clear: the application had no socket for the settle time, and min-wait was over.
fn judge_clear(draw: &Draw, seen: &Seen, release: &Release, wrong: &mut Vec<String>) {
    let (settle, min_wait) = (ms(draw.settings.settle), ms(draw.settings.min_wait));
    if release.after < settle.max(min_wait) {
        wrong.push(format!("clear after {:?}, before settle time and min-wait were over", release.after));
    }
    let exits: Vec<_> = seen.lines.iter().filter_map(exits).collect();
    if exits.len() < draw.processes() {
        wrong.push("clear, and the application has not ended by itself".to_owned());
    }
    let mut spans: Vec<(Duration, Duration)> = exits.iter().flat_map(|exit| exit.sockets.clone()).collect();
    if matches!(draw.application.shape, Shape::Silent(_)) {
        // For so long `outlast app` listens.
        spans.extend(exits.iter().map(|exit| (Duration::ZERO, exit.at)));
    }
    let seen_surely = |(from, to): &(Duration, Duration)| *to >= *from + between_looks(draw);
    let last = united(spans).into_iter().filter(seen_surely).filter_map(|(_, to)| instant(to)).max();
    let clear = release.said + PRINTED;
    if let Some(last) = last
        && clear < last + settle
    {
        let early = last + settle - clear;
        wrong.push(format!("clear {early:?} before the application's last socket was gone for {settle:?}"));
    }
}

/// How long a socket must have been there to be seen: as long as the time between two looks of a settle time, and what a
/// busy machine adds.
fn between_looks(draw: &Draw) -> Duration {
    let settle = ms(draw.settings.settle);
    let pace = draw.settings.poll.map_or((settle / 8).max(ms(10)), |poll| ms(poll).min(settle));
    let delay = |fault: &Fault| fault.of_outlast();
    pace + ms(100) + if draw.has(delay) { longest_pause(draw) } else { Duration::ZERO }
}

/// The end of a process of the application's, and when it had sockets; times of `CLOCK_MONOTONIC`.
struct Exits {
    at: Duration,
    sockets: Vec<(Duration, Duration)>,
}

fn exits(line: &Line) -> Option<Exits> {
    let rest = line.text.strip_prefix("exits at=").filter(|_| line.source == "application")?;
    let (at, sockets) = rest.split_once(" sockets=")?;
    let time = |text: &str| Some(Duration::from_nanos(text.parse().ok()?));
    let span = |text: &str| {
        let (from, to) = text.split_once('-')?;
        Some((time(from)?, time(to)?))
    };
    let sockets = if sockets.is_empty() { Some(Vec::new()) } else { sockets.split(',').map(span).collect() };
    Some(Exits { at: time(at)?, sockets: sockets? })
}

/// Those that overlap as one.
fn united(mut spans: Vec<(Duration, Duration)>) -> Vec<(Duration, Duration)> {
    spans.sort_unstable();
    let mut united: Vec<(Duration, Duration)> = Vec::new();
    for (from, to) in spans {
        match united.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => united.push((from, to)),
        }
    }
    united
}

/// Whether a hold until the timeout had something to hold for at its end.
fn had_a_holder(draw: &Draw, seen: &Seen, release: &Release) -> bool {
    // Without descriptors it cannot look, and then it has to hold.
    let blind = draw.has(|fault| matches!(fault, Fault::Files { who: "outlast", .. }));
    // The settle time, a look, and what a busy machine adds.
    let lately = ms(draw.settings.settle) + ms(draw.settings.poll.unwrap_or(250)) + SLACK;
    let held = |until: Instant| until + lately > release.arrived;
    // While a listener holds nobody looks at bytes: their time begins when the application has ended.
    let stalls = draw.clients.contains(&Client::Vanishes);
    let stalled = if stalls { STALLED } else { Duration::ZERO };
    let application = seen.application().is_ok_and(|application| held(application.exit.at + stalled));
    let clients = held(seen.clients_done + stalled);
    blind || application || clients
}

/// The hook's exit status, as the table of reasons has it.
fn judge_status(draw: &Draw, source: &str, reason: &str, hook: Option<Exit>, wrong: &mut Vec<String>) {
    let expected = match reason {
        "timeout" if !draw.settings.exit_zero => Status::Code(124),
        // SIGINT.
        "signal" => Status::Code(128 + 2),
        _ => Status::Code(0),
    };
    let status = hook.map(|hook| hook.status);
    let ended_with_its_container = status == Some(Status::Signal(9)) && may_lose_its_container(draw);
    if status != Some(expected) && !ended_with_its_container {
        wrong.push(format!("{source}: reason={reason}, and it ended with {status:?}"));
    }
}

fn longest_pause(draw: &Draw) -> Duration {
    let pause = |fault: &Fault| match *fault {
        Fault::Paused { time, .. } => ms(time),
        // A look is short, but not for who gets a twentieth of a CPU; and requests to the proxy are part of the hold.
        Fault::Starved { .. } | Fault::Port { how: How::Hangs | How::TalksNonsense, .. } => SLACK,
        _ => Duration::ZERO,
    };
    draw.faults.iter().map(pause).sum()
}

/// What was lost for which there is no excuse. There is one where something was drawn that can lose anything, and
/// either the control, the same with a proxy that never stops, lost something of that kind as well; or Envoy had died of a
/// fault before outlast let go, for which requests are in flight then only chance decides.
pub(crate) fn without_excuse<'a>(
    draw: &Draw,
    seen: &'a Seen,
    reasons: &[String],
    control: &BTreeSet<String>,
) -> BTreeMap<&'a str, Vec<&'a Loss>> {
    let let_go = reasons.iter().any(|reason| !["proxy-gone", "cut short"].contains(&reason.as_str()));
    let died = seen.envoy_died.filter(|_| !let_go);
    let excused = |kind: &String, loss: &Loss| {
        draw.has_excuse() && (control.contains(kind) || died.is_some_and(|died| loss.at + NOTED > died))
    };
    let unexcused = |(kind, losses): (&'a String, &'a Vec<Loss>)| {
        let left: Vec<_> = losses.iter().filter(|loss| !excused(kind, loss)).collect();
        (!left.is_empty()).then_some((kind.as_str(), left))
    };
    seen.lost.iter().filter_map(unexcused).collect()
}

impl Release {
    fn read(line: &Line) -> Option<Self> {
        let after = field(line, "after")?;
        Some(Self {
            reason: field(line, "reason")?,
            after: Duration::try_from_secs_f64(after.strip_suffix('s')?.parse().ok()?).ok()?,
            said: time(line)?,
            arrived: line.at,
        })
    }
}

/// A field of a line of outlast's, in either format.
fn field(line: &Line, key: &str) -> Option<String> {
    if let Ok(json) = serde_json::from_str::<serde_json::Value>(&line.text) {
        return json.get(key)?.as_str().map(str::to_owned);
    }
    line.text.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('=')).map(str::to_owned)
}

/// The part of a day at the start of a line, RFC 3339 in UTC.
fn time_of_day(line: &Line) -> Option<Duration> {
    let text = line.text.strip_prefix("{\"time\":\"").unwrap_or(&line.text);
    let (_, time) = text.split_once('T')?;
    let (time, _) = time.split_once('Z')?;
    let mut parts = time.split(':');
    let mut number = || parts.next()?.parse::<f64>().ok();
    let (hours, minutes, seconds) = (number()?, number()?, number()?);
    Duration::try_from_secs_f64((hours * 60.0 + minutes) * 60.0 + seconds).ok()
}

fn is_outlasts(line: &Line) -> bool {
    line.text.starts_with(['2', '{']) && time_of_day(line).is_some()
}

/// When a line was written, by its own time. The wall clock's, as of now, tells which instant that was.
fn time(line: &Line) -> Option<Instant> {
    const DAY: Duration = Duration::from_secs(86_400);
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let today = wall.checked_sub(DAY * u32::try_from(wall.as_secs() / DAY.as_secs()).ok()?)?;
    let then = time_of_day(line)?;
    // One that seems to come was written before midnight.
    let ago = today.checked_sub(then).or_else(|| (today + DAY).checked_sub(then))?;
    Instant::now().checked_sub(ago)
}

fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line {
        Line { at: Instant::now(), source: "sidecar".to_owned(), text: text.to_owned() }
    }

    #[test]
    fn spans_that_overlap_are_one() {
        let spans = [(5, 9), (1, 3), (2, 4), (8, 12)].map(|(from, to)| (ms(from), ms(to)));
        assert_eq!(united(spans.into()), [(ms(1), ms(4)), (ms(5), ms(12))]);
        let exits =
            exits(&Line { source: "application".to_owned(), ..line("exits at=9 sockets=1-2,4-9") }).unwrap();
        assert_eq!(exits.at, Duration::from_nanos(9));
        assert_eq!(
            exits.sockets,
            [(1, 2), (4, 9)].map(|(from, to)| (Duration::from_nanos(from), Duration::from_nanos(to)))
        );
    }

    #[test]
    fn a_release_is_read_in_both_formats() {
        for text in [
            "2026-08-01T13:04:11.155Z INFO hold released reason=clear after=4.201s holders=0",
            r#"{"time":"2026-08-01T13:04:11.155Z","level":"info","message":"hold released","reason":"clear","after":"4.201s"}"#,
        ] {
            let line = line(text);
            assert!(is_outlasts(&line));
            let release = Release::read(&line).unwrap();
            assert_eq!((release.reason.as_str(), release.after), ("clear", ms(4_201)));
            assert_eq!(
                time_of_day(&line),
                Some(Duration::from_millis(((13 * 60 + 4) * 60 + 11) * 1_000 + 155))
            );
        }
        let envoys = line("[2026-08-01 13:04:11.155][5][warning][main] [source/server/server.cc:1059] T Z");
        assert!(!is_outlasts(&envoys));
    }
}
