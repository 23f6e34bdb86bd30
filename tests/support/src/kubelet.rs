//! Stopping a Pod as kubelet does.

use crate::container::{Exit, Process};
use crate::pod::Pod;
use nix::sys::signal::Signal;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Kubelet's least time between the stop signal and SIGKILL.
const LEAST: Duration = Duration::from_secs(2);

/// How a Pod is to be stopped.
#[derive(Clone, Debug)]
pub struct StopPlan {
    /// The Pod's terminationGracePeriodSeconds.
    pub grace: Duration,
    /// The sidecar's preStop hook.
    pub hook: Option<Vec<String>>,
    /// The sidecar gets a second stop signal so long after the first.
    pub repeat: Option<Duration>,
    /// The hook is run a second time, so long after the first began: kubelet promises one time at least.
    pub again: Option<Duration>,
}

impl StopPlan {
    /// Without a hook.
    pub fn new(grace: Duration) -> Self {
        Self { grace, hook: None, repeat: None, again: None }
    }

    /// With a preStop hook in the sidecar.
    #[must_use]
    pub fn hook(mut self, argv: &[&str]) -> Self {
        self.hook = Some(argv.iter().map(ToString::to_string).collect());
        self
    }
}

/// How one container stopped.
#[derive(Clone, Debug)]
pub struct ContainerReport {
    /// The hook's end; none if there was no hook, or it outlived the grace period.
    pub hook: Option<Exit>,
    /// Likewise of its second run.
    pub again: Option<Exit>,
    /// When the stop signal was sent.
    pub signalled: Instant,
    pub exit: Exit,
    /// SIGKILL was needed.
    pub killed: bool,
}

/// How a Pod stopped.
#[derive(Clone, Debug)]
pub struct StopReport {
    pub started: Instant,
    pub sidecar: ContainerReport,
    pub application: Option<ContainerReport>,
}

impl StopReport {
    /// Seconds by which the sidecar outlived the application; negative if it went first.
    pub fn outlived(&self) -> Option<f64> {
        let (sidecar, application) = (self.sidecar.exit.at, self.application.as_ref()?.exit.at);
        let after = sidecar.saturating_duration_since(application).as_secs_f64();
        Some(after - application.saturating_duration_since(sidecar).as_secs_f64())
    }
}

impl Pod {
    /// Stops both containers at once: hook, signal, SIGKILL at the end of the grace period. When the last one has
    /// exited the Pod's network is taken away at once.
    pub fn stop(&self, plan: &StopPlan) -> StopReport {
        let started = Instant::now();
        let without = StopPlan::new(plan.grace);
        self.log().push("kubelet", format!("stop, grace period {:?}", plan.grace));
        let (sidecar, application) = thread::scope(|s| {
            let sidecar = s.spawn(|| self.stop_container(self.sidecar(), plan, started));
            let application =
                self.application().map(|a| s.spawn(|| self.stop_container(a, &without, started)));
            (sidecar.join().unwrap(), application.map(|a| a.join().unwrap()))
        });
        self.part();
        StopReport { started, sidecar, application }
    }

    /// Stops the application alone, and the sidecar only after `over` has returned: a proxy that is never in anyone's way.
    /// Where the sidecar has ended by itself the network goes with the application, as ever.
    pub fn stop_in_turn(&self, grace: Duration, over: impl FnOnce() + Send) -> StopReport {
        const LOOK: Duration = Duration::from_millis(20);
        let started = Instant::now();
        let plan = StopPlan::new(grace);
        self.log().push("kubelet", "stop of the application alone".to_owned());
        let application = self.application().map(|a| self.stop_container(a, &plan, started));
        thread::scope(|s| {
            let over = s.spawn(over);
            while !over.is_finished() && self.sidecar().wait(LOOK).is_none() {}
            if self.sidecar().exit().is_some() {
                self.part();
            }
        });
        let sidecar = self.stop_container(self.sidecar(), &plan, Instant::now());
        if !self.gone.load(Ordering::Relaxed) {
            self.part();
        }
        StopReport { started, sidecar, application }
    }

    fn stop_container(&self, container: &Process, plan: &StopPlan, started: Instant) -> ContainerReport {
        let left = || plan.grace.saturating_sub(started.elapsed());
        // A hook that cannot be started is a failed hook: the stop goes on.
        let run = |source| plan.hook.as_ref().and_then(|argv| self.start_hook(argv, source).ok());
        let hook = run("hook");
        let again = hook.as_ref().zip(plan.again).and_then(|(hook, after)| {
            hook.wait(after.min(left()));
            run("hook again")
        });
        let [hook_exit, again_exit] = [hook, again].map(|hook| hook.and_then(|hook| hook.wait(left())));
        let signalled = Instant::now();
        container.signal(Signal::SIGTERM);
        let kill_at = signalled + left().max(LEAST);
        if let Some(after) = plan.repeat
            && container.wait(after).is_none()
        {
            container.signal(Signal::SIGTERM);
        }
        let exit = container.wait(kill_at.saturating_duration_since(Instant::now()));
        let killed = exit.is_none();
        if killed {
            container.signal(Signal::SIGKILL);
        }
        let exit =
            exit.or_else(|| container.wait(Duration::from_secs(60))).expect("SIGKILL ends a container");
        ContainerReport { hook: hook_exit, again: again_exit, signalled, exit, killed }
    }
}
