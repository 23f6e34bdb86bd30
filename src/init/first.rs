//! What has to happen before Rust's own start-up, and what it would make unknowable.

use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use nix::libc;

/// The kernel's signal set: bit n-1 is signal n. libc's own functions leave out the signals that it keeps for
/// threads (32, 33, on musl 34); the kernel delivers those like any other.
pub type Mask = u64;

/// Every signal. KILL and STOP cannot be blocked, and real faults end the process all the same.
pub const ALL: Mask = Mask::MAX;

static MASK: AtomicU64 = AtomicU64::new(0);
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);
static CHILD_IGNORED: AtomicBool = AtomicBool::new(false);

/// Runs before Rust's start-up, from `.init_array`: blocks every signal, so that none is lost from the first
/// instruction on, and notes what the child gets back.
///
/// Rust's start-up opens `/dev/null` where one of the fds 0 to 2 is closed, aborts where there is no `/dev`, and
/// the child would get that file. A closed one is filled here with an eventfd, which needs no file system and
/// is closed again by the child's exec.
pub extern "C" fn before_main() {
    MASK.store(change_mask(ALL), Relaxed);
    PIPE_IGNORED.store(is_ignored(libc::SIGPIPE), Relaxed);
    CHILD_IGNORED.store(is_ignored(libc::SIGCHLD), Relaxed);
    for fd in 0..=2 {
        // SAFETY: both calls take numbers only. The lowest free number is this fd, because those below are open.
        unsafe {
            if libc::fcntl(fd, libc::F_GETFD) == -1 {
                libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            }
        }
    }
}

/// Sets the mask of blocked signals; returns the one before.
fn change_mask(mask: Mask) -> Mask {
    let mut before: Mask = 0;
    // SAFETY: both pointers are to a mask of the size that is passed, as the kernel's ABI wants it.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const mask,
            &raw mut before,
            size_of::<Mask>(),
        );
    }
    before
}

/// What outlast was started with, for the child.
#[derive(Clone, Copy, Debug)]
pub struct Inherited {
    mask: Mask,
    pipe_ignored: bool,
    child_ignored: bool,
}

impl Inherited {
    /// As noted before Rust's start-up.
    #[must_use]
    pub fn get() -> Inherited {
        Inherited {
            mask: MASK.load(Relaxed),
            pipe_ignored: PIPE_IGNORED.load(Relaxed),
            child_ignored: CHILD_IGNORED.load(Relaxed),
        }
    }

    /// Puts dispositions and mask back: the mask last, for what is pending is delivered then. Async-signal-safe,
    /// for use between fork and exec.
    pub fn restore(self) {
        set_disposition(libc::SIGPIPE, self.pipe_ignored);
        set_disposition(libc::SIGCHLD, self.child_ignored);
        change_mask(self.mask);
    }
}

/// Blocks every signal but these, even if they were blocked when the process was started.
pub fn let_through(signals: &[libc::c_int]) {
    let bit = |signal: &libc::c_int| 1_u64.wrapping_shl(signal.unsigned_abs().wrapping_sub(1));
    change_mask(signals.iter().map(bit).fold(ALL, |mask, bit| mask & !bit));
}

/// Makes what a parent of children and a reader of signals needs of the state that it was started in.
///
/// Where SIGCHLD is ignored, the kernel reaps children itself and tells no status. And musl's sigaction, with which
/// Rust's start-up installs its handlers, unblocks the signals 33 and 34.
pub fn take_over() {
    set_disposition(libc::SIGCHLD, false);
    change_mask(ALL);
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: with no new action the call only fills in the old one, which is read only where it did.
    unsafe {
        libc::sigaction(signal, null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

fn set_disposition(signal: libc::c_int, ignore: bool) {
    // SAFETY: all-zero is a valid sigaction; SIG_DFL and SIG_IGN run no code of ours.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = if ignore { libc::SIG_IGN } else { libc::SIG_DFL };
        libc::sigaction(signal, &raw const action, null_mut());
    }
}
