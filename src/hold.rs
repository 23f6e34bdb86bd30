//! When a hold ends: a state machine that is fed with looks and never touches the kernel.
//!
//! All times are durations since the start of the hold, on one monotonic clock.

use std::fmt;
use std::time::Duration;

use nix::libc::{SIGINT, SIGQUIT, SIGTERM};

/// What a look costs, with all since the one before, decides how soon the next one comes: this many times the cost. Half
/// of 1 % of a core, so that a hold stays below 1 % with its dear start.
const COST_FACTOR: u32 = 200;
/// Bounds of the time between looks with `--poll=auto`. Where the upper one counts, looks are so dear that the one which
/// notices the end and the one which confirms it take some 10 ms each: all together stays within 250 ms.
const POLL_BOUNDS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// While it is clear, there are at least this many looks in the settle time, whatever they cost: no look is of one instant,
/// and one alone can miss connections that end within it.
const LOOKS_TO_SETTLE: u32 = 8;

/// The terms of a hold, from the settings.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// How long there must have been no holder.
    pub settle: Duration,
    /// The shortest hold.
    pub min_wait: Duration,
    /// The longest hold.
    pub timeout: Duration,
    /// The time between looks; none: by the cost of a look.
    pub poll: Option<Duration>,
}

/// Why a hold ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No holder for the settle time, and min-wait is over.
    Clear,
    /// There is no proxy left to hold for.
    ProxyGone,
    /// The timeout is over.
    Timeout,
    /// This signal ended the hold early.
    Signal(i32),
    /// There was nothing to do: the timeout is 0, or the container is a native sidecar.
    Off,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Clear => "clear",
            Reason::ProxyGone => "proxy-gone",
            Reason::Timeout => "timeout",
            Reason::Signal(_) => "signal",
            Reason::Off => "off",
        })
    }
}

/// Who holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// `outlast run`, after a stop signal.
    Run,
    /// `outlast prestop`, before it.
    Hook,
}

/// Whether anything holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// At least one holder.
    Held,
    /// No holder.
    Clear,
    /// Something could not be read: unknown is not zero.
    Unknown,
}

/// Whether the proxy lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxy {
    /// At least one of its processes does.
    Alive,
    /// None is in the process list, and PID 1 is: the list shows this container.
    Gone,
    /// None is in the process list, and neither is PID 1 (hidepid), or there is no list.
    Unknown,
}

/// One look at the Pod.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// When the look began.
    pub begin: Duration,
    /// When it ended.
    pub end: Duration,
    /// The CPU time that it took, with all since the look before.
    pub cost: Duration,
    /// What holds.
    pub sight: Sight,
    /// What there is to hold for.
    pub proxy: Proxy,
}

/// What to do after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again at this time.
    LookAt(Duration),
    /// Let go.
    Release(Reason),
}

/// A hold that is under way.
#[derive(Debug)]
pub struct Hold {
    terms: Terms,
    keeper: Keeper,
    /// End of the first look of the present row of clear ones.
    clear_since: Option<Duration>,
    proxy_seen: bool,
    proxy_asked: bool,
}

impl Hold {
    /// Starts a hold; the first look is due at once.
    #[must_use]
    pub fn new(terms: Terms, keeper: Keeper) -> Hold {
        Hold { terms, keeper, clear_since: None, proxy_seen: false, proxy_asked: false }
    }

    /// Takes one look into account.
    ///
    /// The settle time runs from the end of one clear look to the beginning of another, so that what lies
    /// between is at least that long even when a look was stopped or starved in the middle; even a settle time
    /// of 0 takes two looks.
    pub fn observe(&mut self, look: Look) -> Next {
        if self.proxy_is_gone(look.proxy) {
            return Next::Release(Reason::ProxyGone);
        }
        let Terms { settle, min_wait, timeout, .. } = self.terms;
        let mut due = look.end.saturating_add(self.poll(look.cost));
        if look.sight == Sight::Clear {
            let settled = self.clear_since.unwrap_or(look.end).saturating_add(settle).max(min_wait);
            if self.clear_since.is_some() && look.begin >= settled {
                return Next::Release(Reason::Clear);
            }
            self.clear_since.get_or_insert(look.end);
            if self.terms.poll.is_none() {
                let pace = settle.checked_div(LOOKS_TO_SETTLE).unwrap_or_default().max(POLL_BOUNDS.0);
                due = due.min(look.end.saturating_add(pace));
            }
            due = due.min(settled);
        } else {
            self.clear_since = None;
        }
        if look.begin >= timeout {
            return Next::Release(Reason::Timeout);
        }
        Next::LookAt(due.min(timeout))
    }

    /// Whether a signal that comes during the hold ends it. In run a repeated SIGTERM does not: some runtimes and node
    /// shutdowns send two.
    #[must_use]
    pub fn signal(&self, number: i32) -> Option<Reason> {
        let ends = match (self.keeper, number) {
            (_, SIGINT | SIGQUIT) => true,
            (keeper, SIGTERM) => keeper == Keeper::Hook,
            _ => false,
        };
        ends.then_some(Reason::Signal(number))
    }

    /// Whether a proxy process was ever seen.
    #[must_use]
    pub fn proxy_was_seen(&self) -> bool {
        self.proxy_seen
    }

    /// "Seen and none is left", or "none there at the start": later than that, a proxy that never was
    /// visible says nothing.
    fn proxy_is_gone(&mut self, proxy: Proxy) -> bool {
        let first = !self.proxy_asked;
        self.proxy_asked |= proxy != Proxy::Unknown;
        self.proxy_seen |= proxy == Proxy::Alive;
        proxy == Proxy::Gone && (self.proxy_seen || first)
    }

    fn poll(&self, cost: Duration) -> Duration {
        let (least, most) = POLL_BOUNDS;
        self.terms.poll.unwrap_or_else(|| cost.saturating_mul(COST_FACTOR).clamp(least, most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    const TERMS: Terms = Terms { settle: ms(200), min_wait: ms(0), timeout: ms(23_000), poll: None };

    fn look(at: u64, sight: Sight) -> Look {
        Look { begin: ms(at), end: ms(at + 1), cost: ms(1), sight, proxy: Proxy::Alive }
    }

    #[test]
    fn clear_after_the_settle_time_and_not_before() {
        let mut hold = Hold::new(TERMS, Keeper::Run);
        assert_eq!(hold.observe(look(0, Sight::Held)), Next::LookAt(ms(201)));
        assert_eq!(hold.observe(look(100, Sight::Clear)), Next::LookAt(ms(126)), "eight looks, though dear");
        assert_eq!(hold.observe(look(290, Sight::Clear)), Next::LookAt(ms(301)));
        assert_eq!(hold.observe(look(300, Sight::Clear)), Next::LookAt(ms(301)));
        assert_eq!(hold.observe(look(301, Sight::Clear)), Next::Release(Reason::Clear));
    }

    #[test]
    fn a_holder_or_an_error_starts_the_settle_time_again() {
        for sight in [Sight::Held, Sight::Unknown] {
            let mut hold = Hold::new(TERMS, Keeper::Run);
            hold.observe(look(0, Sight::Clear));
            hold.observe(look(150, sight));
            assert_eq!(hold.observe(look(300, Sight::Clear)), Next::LookAt(ms(326)));
            assert_eq!(hold.observe(look(501, Sight::Clear)), Next::Release(Reason::Clear));
        }
    }

    #[test]
    fn min_wait_delays_clear_and_is_looked_at_exactly() {
        let mut hold = Hold::new(Terms { min_wait: ms(1_000), ..TERMS }, Keeper::Run);
        hold.observe(look(0, Sight::Clear));
        assert_eq!(hold.observe(look(990, Sight::Clear)), Next::LookAt(ms(1_000)));
        assert_eq!(hold.observe(look(1_000, Sight::Clear)), Next::Release(Reason::Clear));
    }

    #[test]
    fn a_settle_time_of_zero_takes_two_looks() {
        let mut hold = Hold::new(Terms { settle: ms(0), ..TERMS }, Keeper::Run);
        assert_eq!(hold.observe(look(0, Sight::Clear)), Next::LookAt(ms(1)));
        assert_eq!(hold.observe(look(1, Sight::Clear)), Next::Release(Reason::Clear));
    }

    #[test]
    fn the_timeout_ends_it_and_an_error_does_not() {
        let mut hold = Hold::new(TERMS, Keeper::Run);
        assert_eq!(hold.observe(look(22_990, Sight::Unknown)), Next::LookAt(ms(23_000)));
        assert_eq!(hold.observe(look(23_000, Sight::Unknown)), Next::Release(Reason::Timeout));
    }

    #[test]
    fn a_proxy_that_goes_or_never_was_ends_it() {
        let gone = |at| Look { proxy: Proxy::Gone, ..look(at, Sight::Held) };
        let unknown = |at| Look { proxy: Proxy::Unknown, ..look(at, Sight::Held) };
        let mut hold = Hold::new(TERMS, Keeper::Run);
        hold.observe(look(0, Sight::Held));
        assert_eq!(hold.observe(gone(10)), Next::Release(Reason::ProxyGone));
        let mut hold = Hold::new(TERMS, Keeper::Run);
        hold.observe(unknown(0));
        assert_eq!(hold.observe(gone(10)), Next::Release(Reason::ProxyGone));
    }

    #[test]
    fn the_poll_follows_the_cost_within_its_bounds() {
        let hold = Hold::new(TERMS, Keeper::Run);
        assert_eq!(hold.poll(Duration::from_micros(11)), ms(10));
        assert_eq!(hold.poll(Duration::from_micros(800)), ms(160));
        assert_eq!(hold.poll(ms(8)), ms(200));
        assert_eq!(Hold::new(Terms { poll: Some(ms(1_000)), ..TERMS }, Keeper::Run).poll(ms(8)), ms(1_000));
    }

    fn sights() -> impl Strategy<Value = Sight> {
        prop_oneof![2 => Just(Sight::Held), 3 => Just(Sight::Clear), 1 => Just(Sight::Unknown)]
    }

    fn proxies() -> impl Strategy<Value = Proxy> {
        prop_oneof![20 => Just(Proxy::Alive), 1 => Just(Proxy::Gone), 4 => Just(Proxy::Unknown)]
    }

    fn signals() -> impl Strategy<Value = Option<i32>> {
        prop_oneof![200 => Just(None), 1 => (1..=64).prop_map(Some), 1 => Just(Some(SIGTERM))]
    }

    proptest! {
        /// Looks come when asked for, late by `lag` and lasting `length`, as on a starved machine; signals come between.
        #[test]
        fn never_too_early_never_too_late(
            settle in 0u64..2_000, min_wait in 0u64..5_000, timeout in 1u64..20_000, poll in proptest::option::of(1u64..3_000),
            keeper in prop_oneof![Just(Keeper::Run), Just(Keeper::Hook)],
            signals in proptest::collection::vec(signals(), 4_000),
            looks in proptest::collection::vec((sights(), proxies(), 0u64..400, 0u64..400), 1..4_000),
        ) {
            let terms = Terms { settle: ms(settle), min_wait: ms(min_wait.min(timeout)), timeout: ms(timeout), poll: poll.map(ms) };
            let mut hold = Hold::new(terms, keeper);
            let mut at = Duration::ZERO;
            // An independent account: since when no look but clear ones was seen.
            let mut clear_since = None;
            let mut seen = false;
            let mut released = false;
            for (index, &(sight, proxy, lag, length)) in looks.iter().enumerate() {
                let signal = signals[index];
                if let Some(reason) = signal.and_then(|number| hold.signal(number)) {
                    prop_assert_eq!(Some(reason), signal.map(Reason::Signal));
                    prop_assert!(signal != Some(SIGTERM) || keeper == Keeper::Hook, "a repeated stop signal");
                    prop_assert!([SIGTERM, SIGINT, SIGQUIT].map(Some).contains(&signal));
                    released = true;
                    break;
                }
                prop_assert!(![SIGINT, SIGQUIT].map(Some).contains(&signal), "the operator says: now");
                let begin = at + ms(lag);
                let end = begin + ms(length);
                clear_since = if sight == Sight::Clear { clear_since.or(Some(end)) } else { None };
                seen |= proxy == Proxy::Alive;
                match hold.observe(Look { begin, end, cost: ms(length), sight, proxy }) {
                    Next::LookAt(next) => {
                        prop_assert!(begin < terms.timeout, "still holding after a look at {begin:?}");
                        prop_assert!(next <= terms.timeout.max(end));
                        at = next.max(end);
                    }
                    Next::Release(reason) => {
                        released = true;
                        match reason {
                            Reason::Clear => {
                                prop_assert_eq!(sight, Sight::Clear);
                                prop_assert!(begin >= clear_since.unwrap() + terms.settle && begin >= terms.min_wait);
                            }
                            Reason::Timeout => prop_assert!(begin >= terms.timeout),
                            Reason::ProxyGone => {
                                prop_assert_eq!(proxy, Proxy::Gone);
                                prop_assert!(seen || looks[..index].iter().all(|l| l.1 == Proxy::Unknown));
                            }
                            Reason::Signal(_) | Reason::Off => prop_assert!(false, "not from a look"),
                        }
                        break;
                    }
                }
            }
            prop_assert!(released || at < terms.timeout + ms(800));
        }
    }
}
