//! What a rollout is to be, drawn from a seed and a number: the same ones give the same Pod.

#![allow(clippy::struct_excessive_bools, reason = "a draw is yes or no many times")]

use fastrand::Rng;
use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::time::Duration;

/// Milliseconds.
pub(crate) type Ms = u64;

/// Grace periods, in seconds; the shortest that is long enough is taken.
const GRACE: RangeInclusive<u64> = 8..=45;

/// One stop of a Pod.
#[derive(Clone, Debug)]
pub(crate) struct Draw {
    pub(crate) through: Through,
    pub(crate) settings: Settings,
    /// pilot-agent's own drain, in seconds.
    pub(crate) own_drain: u64,
    /// A pilot-agent without `/drain`: from before Istio 1.21.
    pub(crate) old_agent: bool,
    pub(crate) application: Application,
    pub(crate) clients: Vec<Client>,
    /// When the clients hear of the stop, since then; none: shortly before it.
    pub(crate) hear: Option<Ms>,
    pub(crate) faults: Vec<Fault>,
    /// In seconds.
    pub(crate) grace: u64,
    /// Not drawn: more of the sidecar's environment.
    pub(crate) env: Vec<(String, String)>,
}

/// What keeps the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Through {
    Run,
    Prestop,
    Both,
}

/// Those that an operator would set.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) settle: Ms,
    pub(crate) min_wait: Ms,
    pub(crate) drain: Option<Ms>,
    pub(crate) poll: Option<Ms>,
    pub(crate) source: &'static str,
    pub(crate) fast_exit: bool,
    pub(crate) exit_zero: bool,
    pub(crate) json: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Application {
    pub(crate) shape: Shape,
    pub(crate) address: Address,
    /// Processes that serve; 0 is one without a parent.
    pub(crate) workers: u64,
    /// Each process has two listeners on its port.
    pub(crate) twice: bool,
    pub(crate) each_closed: bool,
    pub(crate) serve_more: Ms,
    /// Another listener comes and goes while it serves on.
    pub(crate) blink: bool,
    /// The listeners close for so long, and it serves on as before.
    pub(crate) reload: Option<Ms>,
    /// How long the answer to its last call takes.
    pub(crate) last_call: Option<Ms>,
    pub(crate) record: Option<Record>,
}

/// What the application sends at its end on a connection that it closes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Plain,
    /// Envoy makes TLS of it, with an upstream that says hello so late.
    Tls(Ms),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Serves,
    /// No listener, but a connection to an upstream.
    Works,
    /// Under `outlast app`: neither, for so long at its end.
    Silent(Ms),
    NeverStops,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    V4,
    V6,
    Loopback,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Client {
    Http {
        per_second: u32,
        takes: Ms,
    },
    KeepAlive {
        clients: u32,
        takes: Ms,
    },
    Http2 {
        per_second: u32,
        takes: Ms,
    },
    Echo {
        clients: u32,
    },
    HalfClosed {
        per_second: u32,
        takes: Ms,
    },
    HalfClosing {
        per_second: u32,
        takes: Ms,
    },
    /// Bytes, and how many of them it reads a second.
    Slow {
        bytes: u32,
        rate: u32,
    },
    /// Falls silent as the Pod is stopped, in the middle of an answer.
    Vanishes,
}

/// Times are since the stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    EnvoyKilled {
        at: Ms,
    },
    /// A port of the loopback, from shortly before the stop.
    Port {
        port: u16,
        how: How,
    },
    Starved {
        who: &'static str,
        percent: u32,
    },
    Paused {
        who: &'static str,
        at: Ms,
        time: Ms,
    },
    /// So many files more than it has open, from shortly before the stop.
    Files {
        who: &'static str,
        more: u64,
    },
    StopRepeated {
        after: Ms,
    },
    HookTwice {
        after: Ms,
    },
    SynsDropped {
        count: u32,
    },
    /// SIGINT for outlast, so long after its hold began.
    Interrupted {
        after: Ms,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Hangs,
    Refuses,
    TalksNonsense,
}

impl Fault {
    /// For the figures.
    pub(crate) fn name(self) -> String {
        match self {
            Fault::EnvoyKilled { .. } => "Envoy killed".to_owned(),
            Fault::Port { port, how } => format!("port {port} {how}"),
            Fault::Starved { who, .. } => format!("{who} starved"),
            Fault::Paused { who, .. } => format!("{who} paused"),
            Fault::Files { who, .. } => format!("{who} out of files"),
            Fault::StopRepeated { .. } => "stop signal repeated".to_owned(),
            Fault::HookTwice { .. } => "hook run twice".to_owned(),
            Fault::SynsDropped { .. } => "SYNs dropped".to_owned(),
            Fault::Interrupted { .. } => "interrupted".to_owned(),
        }
    }

    /// Nothing but outlast feels it, and so it is no excuse for anything.
    pub(crate) fn of_outlast(self) -> bool {
        match self {
            Fault::Starved { who, .. } | Fault::Paused { who, .. } | Fault::Files { who, .. } => {
                who == "outlast"
            }
            Fault::StopRepeated { .. } | Fault::HookTwice { .. } | Fault::Interrupted { .. } => true,
            Fault::EnvoyKilled { .. } | Fault::Port { .. } | Fault::SynsDropped { .. } => false,
        }
    }

    /// By how much the stop takes longer with it.
    fn costs(self) -> Ms {
        match self {
            Fault::Paused { time, .. } => time,
            Fault::Starved { .. } => 2_000,
            // The kernel's first tries.
            Fault::SynsDropped { count } => u64::from(count) * 2_000,
            _ => 0,
        }
    }
}

impl Client {
    /// How long its last request takes.
    pub(crate) fn takes(self) -> Ms {
        match self {
            Client::Http { takes, .. }
            | Client::KeepAlive { takes, .. }
            | Client::Http2 { takes, .. }
            | Client::HalfClosed { takes, .. }
            | Client::HalfClosing { takes, .. } => takes,
            Client::Echo { .. } => 0,
            Client::Slow { bytes, rate } => u64::from(bytes) * 1_000 / u64::from(rate),
            // Until its bytes are given up.
            Client::Vanishes => 6_000,
        }
    }

    /// Whether it speaks HTTP, which the application serves on another port.
    pub(crate) fn http(self) -> bool {
        !matches!(self, Client::Echo { .. } | Client::HalfClosed { .. } | Client::HalfClosing { .. })
    }
}

impl Draw {
    pub(crate) fn new(seed: u64, index: u64) -> Self {
        // Two numbers in one; the generator spreads them.
        let mut rng = Rng::with_seed(seed.rotate_left(32) ^ index);
        let rng = &mut rng;
        let through =
            one(rng, &[Through::Run, Through::Run, Through::Prestop, Through::Prestop, Through::Both]);
        let settings = Settings::draw(rng);
        if one_in(rng, 25) {
            return Self::interrupted(through, settings, rng);
        }
        let application = Application::draw(rng, settings.settle);
        let clients = clients(rng, &application);
        // A request must have come to the application before its listener closes.
        let hear = (application.serve_more >= 1_000).then(|| rng.u64(0..=application.serve_more - 900));
        let mut draw = Self {
            through,
            settings,
            own_drain: one(rng, &[0, 1]),
            old_agent: one_in(rng, 6),
            application,
            clients,
            hear,
            faults: Vec::new(),
            grace: 0,
            env: Vec::new(),
        };
        for _ in 0..one(rng, &[0, 0, 1, 1, 1, 2]) {
            let fault = draw.fault(rng);
            // Two of one kind would undo each other.
            if draw.faults.iter().all(|other| other.name() != fault.name()) {
                draw.faults.push(fault);
            }
        }
        draw.fit_grace(rng);
        draw
    }

    /// A hold that is ended by a signal loses what comes after it: so there is nothing to lose.
    fn interrupted(through: Through, settings: Settings, rng: &mut Rng) -> Self {
        let application = Application {
            shape: Shape::Serves,
            serve_more: 4_000,
            blink: false,
            reload: None,
            last_call: None,
            record: None,
            ..Application::draw(rng, settings.settle)
        };
        let faults = vec![Fault::Interrupted { after: rng.u64(0..=1_500) }];
        let (clients, hear) = (Vec::new(), None);
        let mut draw = Self {
            through,
            settings,
            own_drain: one(rng, &[0, 1]),
            old_agent: one_in(rng, 6),
            application,
            clients,
            hear,
            faults,
            grace: 0,
            env: Vec::new(),
        };
        draw.fit_grace(rng);
        draw
    }

    fn fault(&self, rng: &mut Rng) -> Fault {
        let at = rng.u64(0..=self.application.serve_more.max(1_000));
        loop {
            let fault = match rng.u32(0..9) {
                0 => Fault::EnvoyKilled { at },
                1 | 2 => Fault::Port {
                    port: one(rng, &[15000, 15020]),
                    how: one(rng, &[How::Hangs, How::Refuses, How::TalksNonsense]),
                },
                3 => Fault::Starved {
                    who: one(rng, &["outlast", "envoy", "application"]),
                    percent: one(rng, &[5, 10, 20]),
                },
                4 | 5 => Fault::Paused {
                    who: one(rng, &["outlast", "outlast", "envoy", "pilot-agent", "application"]),
                    at,
                    time: rng.u64(200..=2_500),
                },
                6 => Fault::Files { who: one(rng, &["envoy", "outlast"]), more: rng.u64(0..=3) },
                7 => Fault::StopRepeated { after: at },
                _ if self.application.last_call.is_some() && one_in(rng, 2) => {
                    Fault::SynsDropped { count: rng.u32(1..=2) }
                }
                _ => Fault::HookTwice { after: rng.u64(0..=1_000) },
            };
            let possible = match fault {
                // Through prestop the stop signal comes after the hold.
                Fault::StopRepeated { .. } => self.through != Through::Prestop,
                Fault::HookTwice { .. } => self.through != Through::Run,
                // Before the stop there is no hook, and during it this would come too late.
                Fault::Files { who: "outlast", .. } | Fault::Starved { who: "outlast", .. } => {
                    self.through != Through::Prestop
                }
                // One that stops in the middle of a reload is gone for longer than the settle time.
                Fault::Starved { who: "application", .. } | Fault::Paused { who: "application", .. } => {
                    self.application.reload.is_none()
                }
                _ => true,
            };
            if possible {
                return fault;
            }
        }
    }

    /// The application is done 4 s before the timeout, on a machine that has time for it.
    fn fit_grace(&mut self, rng: &mut Rng) {
        let hear = self.hear.unwrap_or(0);
        let takes = self.clients.iter().map(|client| client.takes()).max().unwrap_or(0);
        let served = self.application.served();
        let last = self.application.last_call.unwrap_or(0);
        let last = if let Some(Record::Tls(hello)) = self.application.record { last + hello } else { last };
        let silent = if let Shape::Silent(time) = self.application.shape { time } else { 0 };
        let faults: Ms = self.faults.iter().map(|fault| fault.costs()).sum();
        let slack = if self.application.shape == Shape::NeverStops { 1_500 } else { 4_000 };
        let need = served.max(hear + takes).max(self.settings.min_wait) + silent + last + faults + slack;
        let enough = |grace: &u64| timeout_of(*grace) >= Duration::from_millis(need);
        self.grace = GRACE.clone().find(enough).expect("a draw that fits into a grace period");
        let room = Duration::from_secs(self.grace).saturating_sub(self.timeout());
        if room >= Duration::from_secs(7) && one_in(rng, 4) {
            self.own_drain = 5;
        }
    }

    /// outlast's own default.
    pub(crate) fn timeout(&self) -> Duration {
        timeout_of(self.grace)
    }

    /// How many processes the application does its last things in.
    pub(crate) fn processes(&self) -> usize {
        usize::try_from(self.application.workers.max(1)).expect("few")
    }

    /// Whether something was drawn that lets requests fail whatever the proxy does.
    pub(crate) fn has_excuse(&self) -> bool {
        self.faults.iter().any(|fault| !fault.of_outlast())
    }

    pub(crate) fn has(&self, what: impl Fn(&Fault) -> bool) -> bool {
        self.faults.iter().any(what)
    }

    /// The same with a proxy that never stops: nothing that concerns outlast alone.
    pub(crate) fn control(&self) -> Self {
        let faults = self.faults.iter().copied().filter(|fault| !fault.of_outlast()).collect();
        Self { faults, ..self.clone() }
    }
}

/// The grace period less 7 s, and never less than half of it.
fn timeout_of(grace: u64) -> Duration {
    let grace = Duration::from_secs(grace);
    grace.saturating_sub(Duration::from_secs(7)).max(grace / 2)
}

impl Settings {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            settle: one(rng, &[200, 200, 200, 500, 1_000]),
            min_wait: one(rng, &[0, 0, 0, 1_000, 3_000]),
            drain: one(rng, &[None, None, Some(0), Some(1_000), Some(2_000)]),
            poll: one(rng, &[None, None, None, Some(50), Some(500)]),
            source: one(rng, &["auto", "diag", "proc"]),
            fast_exit: !one_in(rng, 3),
            exit_zero: one_in(rng, 5),
            json: one_in(rng, 4),
        }
    }

    /// As the sidecar's environment.
    pub(crate) fn env(&self, grace: u64) -> Vec<(&'static str, String)> {
        let mut env = vec![
            ("OUTLAST_GRACE_PERIOD", format!("{grace}s")),
            ("OUTLAST_SETTLE", format!("{}ms", self.settle)),
            ("OUTLAST_MIN_WAIT", format!("{}ms", self.min_wait)),
            ("OUTLAST_SOURCE", self.source.to_owned()),
            ("OUTLAST_FAST_EXIT", self.fast_exit.to_string()),
            ("OUTLAST_EXIT_ZERO", self.exit_zero.to_string()),
            ("OUTLAST_LOG_FORMAT", if self.json { "json" } else { "text" }.to_owned()),
        ];
        env.extend(self.drain.map(|time| ("OUTLAST_DRAIN", format!("{time}ms"))));
        env.extend(self.poll.map(|time| ("OUTLAST_POLL", format!("{time}ms"))));
        env
    }
}

impl Application {
    fn draw(rng: &mut Rng, settle: Ms) -> Self {
        let shape = match rng.u32(0..12) {
            0 => Shape::Works,
            1 => Shape::Silent(rng.u64(500..=2_500)),
            2 => Shape::NeverStops,
            _ => Shape::Serves,
        };
        // The listener goes first and the requests are finished afterwards, or both go together.
        let serve_more = if one_in(rng, 3) { 0 } else { rng.u64(1_000..=3_500) };
        let reload = (serve_more > 0 && shape != Shape::NeverStops && one_in(rng, 5))
            .then(|| rng.u64(10..=settle / 2));
        let late = Record::Tls(rng.u64(100..=2_000));
        Self {
            shape,
            address: one(rng, &[Address::V4, Address::V4, Address::V6, Address::Loopback]),
            workers: if shape == Shape::Works { 0 } else { one(rng, &[0, 0, 1, 2, 3]) },
            twice: one_in(rng, 4),
            each_closed: one_in(rng, 3),
            serve_more,
            blink: serve_more > 0 && one_in(rng, 6),
            reload,
            // What is lost when the proxy goes while the listeners are closed.
            last_call: (reload.is_some() || rng.bool()).then(|| one(rng, &[0, 0, 300, 1_500])),
            record: one(rng, &[None, None, Some(Record::Plain), Some(late)]),
        }
    }

    /// How long it listens.
    fn served(&self) -> Ms {
        self.reload.map_or(self.serve_more, |gap| 2 * self.serve_more + gap)
    }
}

fn clients(rng: &mut Rng, application: &Application) -> Vec<Client> {
    if application.shape == Shape::Works {
        return Vec::new();
    }
    let takes = |rng: &mut Rng| one(rng, &[0, 20, 200, 1_000, 3_000]);
    if application.reload.is_some() && application.each_closed {
        // So that nothing but the listeners holds when they close.
        return vec![Client::Http { per_second: 10, takes: rng.u64(0..=50) }];
    }
    let client = |rng: &mut Rng| match rng.u32(0..14) {
        0..=2 => Client::Http { per_second: rng.u32(10..=30), takes: takes(rng) },
        3 | 4 => Client::KeepAlive { clients: rng.u32(1..=6), takes: one(rng, &[0, 50, 500]) },
        5..=7 => Client::Http2 { per_second: rng.u32(10..=30), takes: takes(rng) },
        8 | 9 => Client::Echo { clients: rng.u32(1..=5) },
        10 => Client::HalfClosed { per_second: rng.u32(2..=10), takes: takes(rng) },
        11 => Client::HalfClosing { per_second: rng.u32(2..=10), takes: takes(rng) },
        12 => Client::Slow { bytes: rng.u32(2..=10) * 100_000, rate: rng.u32(200..=400) * 1_000 },
        _ => Client::Vanishes,
    };
    let mut clients: Vec<_> = (0..rng.u32(1..=3)).map(|_| client(rng)).collect();
    if application.address == Address::Loopback {
        clients.retain(|client| client.http());
    }
    clients
}

fn one<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.usize(0..of.len())]
}

fn one_in(rng: &mut Rng, of: u32) -> bool {
    rng.u32(0..of) == 0
}

impl Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            How::Hangs => "hangs",
            How::Refuses => "refuses",
            How::TalksNonsense => "talks nonsense",
        })
    }
}

impl Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Client::Http { per_second, takes } => write!(f, "HTTP/1.1, {per_second}/s of {takes} ms"),
            Client::KeepAlive { clients, takes } => write!(f, "{clients} keep-alive, {takes} ms"),
            Client::Http2 { per_second, takes } => write!(f, "HTTP/2, {per_second}/s of {takes} ms"),
            Client::Echo { clients } => write!(f, "{clients} TCP echo"),
            Client::HalfClosed { per_second, takes } => {
                write!(f, "TCP half-closed by the client, {per_second}/s of {takes} ms")
            }
            Client::HalfClosing { per_second, takes } => {
                write!(f, "TCP half-closed by the server, {per_second}/s of {takes} ms")
            }
            Client::Slow { bytes, rate } => write!(f, "slow reader of {bytes} bytes at {rate}/s"),
            Client::Vanishes => f.write_str("a reader that vanishes"),
        }
    }
}

impl Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        match self {
            Fault::EnvoyKilled { at } => write!(f, " after {at} ms"),
            Fault::Starved { percent, .. } => write!(f, " to {percent} %"),
            Fault::Paused { at, time, .. } => write!(f, " after {at} ms for {time} ms"),
            Fault::Files { more, .. } => write!(f, " but {more}"),
            Fault::StopRepeated { after } | Fault::HookTwice { after } => write!(f, " after {after} ms"),
            Fault::Interrupted { after } => write!(f, " {after} ms into the hold"),
            Fault::SynsDropped { count } => write!(f, ", {count}"),
            Fault::Port { .. } => Ok(()),
        }
    }
}

impl Display for Draw {
    /// In words, over several lines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Application { shape, address, workers, twice, each_closed, serve_more, .. } = &self.application;
        let Application { blink, reload, last_call, record, .. } = &self.application;
        writeln!(
            f,
            "through {:?}, grace period {} s, timeout {:?}, pilot-agent drains {} s, {:?}",
            self.through,
            self.grace,
            self.timeout(),
            self.own_drain,
            self.settings
        )?;
        write!(f, "application {shape:?} on {address:?}, {workers} workers, serves {serve_more} ms more")?;
        for (drawn, word) in [
            (*twice, "two listeners each"),
            (*each_closed, "no keep-alive"),
            (*blink, "a listener that comes and goes"),
            (self.old_agent, "beside a pilot-agent from before Istio 1.21"),
        ] {
            if drawn {
                write!(f, ", {word}")?;
            }
        }
        if let Some(time) = last_call {
            write!(f, ", a last call of {time} ms")?;
        }
        if let Some(record) = record {
            write!(f, ", a record at the end ({record:?})")?;
        }
        if let Some(gap) = reload {
            write!(f, ", reloads with a gap of {gap} ms")?;
        }
        match self.hear {
            Some(hear) => writeln!(f, "\nclients, who hear after {hear} ms:")?,
            None => writeln!(f, "\nclients, who hear before:")?,
        }
        for client in &self.clients {
            writeln!(f, "  {client}")?;
        }
        for fault in &self.faults {
            writeln!(f, "fault: {fault}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_numbers_give_the_same_rollout_and_others_another() {
        let words = |seed, index| format!("{:?}", Draw::new(seed, index));
        assert_eq!(words(1, 7), words(1, 7));
        assert_ne!(words(1, 7), words(1, 8));
        assert_ne!(words(1, 7), words(2, 7));
    }

    #[test]
    fn clients_hear_while_the_application_still_listens() {
        for draw in (0..2_000).map(|index| Draw::new(1, index)) {
            assert!(draw.hear.is_none_or(|hear| hear < draw.application.serve_more), "{draw}");
        }
    }
}
