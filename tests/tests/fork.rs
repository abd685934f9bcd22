//! T0: a child of fork that does to its copies of our objects what it likes: it neither hangs nor crashes,
//! and its parent's device goes on (C28, R12).
//!
//! A program of its own: fork takes only the calling thread along, and a test harness has several.
//! One test, so that nothing else runs while it forks.
#![expect(unsafe_code, reason = "forks")]

#[path = "../../driver/tests/scripted/mod.rs"]
mod scripted;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::Device;
use failstop::objects::Pd;
use failstop::owned::Owned;
use failstop::pci::clock::ManualClock;
use failstop::pci::id::{DeviceId, Generation};
use failstop::port::Port;
use failstop::provider::Statistics;
use failstop::queues::completions::Completions;
use failstop::queues::lifecycle::Cause;
use failstop::supervisor::{Policy, Supervisor};
use failstop_dma::proof::ObjectId;
use failstop_dma::region::{Census, FrameRegion, Pool};
use failstop_dma::ring::ExchangeRing;
use failstop_dma::space::AddressSpace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use scripted::{Bench, FRAME, QUEUES, small};

/// Longer than any of this takes, on any machine.
const SOON: Duration = Duration::from_secs(60);
/// So often is a lock held at a fork almost surely.
const FORKS: u32 = 64;

/// Runs `act` in a child and says how that ended; one that hangs is killed.
fn child(act: impl FnOnce()) -> WaitStatus {
    // SAFETY: the child of a process with threads may do what is async-signal-safe, and with this
    // C library also allocate, whose locks its fork handlers put in order; no other thread of this
    // program is in the middle of anything else that `act` needs: the harness waits for this test,
    // the device's threads sleep, and locks that they or threads of the test hold would show as a
    // hang, which is what is tested.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
            // SAFETY: takes no pointer and does not return; what it leaves undone, destructors and exit
            // handlers, is the parent's.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        ForkResult::Parent { child } => end_of(child),
    }
}

fn end_of(child: Pid) -> WaitStatus {
    let end = Instant::now() + SOON;
    loop {
        let status = waitpid(child, Some(WaitPidFlag::WNOHANG)).unwrap();
        if status != WaitStatus::StillAlive {
            return status;
        }
        if Instant::now() > end {
            kill(child, Signal::SIGKILL).unwrap();
            return waitpid(child, None).unwrap();
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The addresses of DMA memory and of registers are given to the child by its next mappings, unless
/// something is there: a drop that unmapped them would take the child's own memory.
fn drops_everything(device: Device, port: Port, supervisor: Supervisor) {
    let map = || memmap2::MmapMut::map_anon(1 << 14).unwrap();
    let mut mine: Vec<_> = (0..64).map(|_| map()).collect();
    drop((supervisor, port, device));
    mine.iter_mut().for_each(|map| map.fill(1));
}

fn bursts(device: &Device, port: &mut Port) {
    let mut frames = port.take_frames(4).unwrap();
    frames
        .iter_mut()
        .for_each(|frame| frame.set_len(60).unwrap());
    for _ in 0..100 {
        assert_eq!(port.rx_burst(&mut frames), 0);
        let _ = port.tx_burst(&mut frames);
    }
    assert!(!port.rq().wait(Some(Duration::from_millis(1))).unwrap());
    assert!(!device.break_now(Cause::User));
    assert!(device.revocation().is_none());
    assert!(device.recover().is_err());
}

/// A child brings nothing of its own into the reach of its parent's device.
fn makes_nothing(device: &Device, pd: &Owned<Pd>) {
    let says = |refused: Option<String>| {
        let text = refused.expect("it was made");
        assert!(text.contains("forked from"), "{text}");
    };
    says(device.alloc_pd().err().map(|error| error.to_string()));
    says(device.create_cq(8).err().map(|error| error.to_string()));
    says(pd.register(8, 2048).err().map(|error| error.to_string()));
    let port = Port::open(device, &small());
    says(port.err().map(|error| error.to_string()));
}

/// What a child is told of its parent's device: what never changes, and otherwise of none.
fn looks(device: &Device) {
    assert_eq!(device.broken(), None);
    assert_eq!(device.generation(), Generation::FIRST);
    assert_eq!((device.provider(), device.part()), ("scripted", "none"));
    assert_eq!(device.mac().0, [2, 0, 0, 0, 0, 1]);
    assert_eq!(device.limits().queues, QUEUES);
    assert_eq!(device.least_frame_size(), FRAME);
    assert!(!device.link().up);
    assert!(!device.wait_link(SOON).up);
    assert_eq!(device.statistics(), Statistics::default());
    assert_eq!(device.completions(), Completions::default());
    assert_eq!(device.objects(), 0);
    assert!(device.recovery().is_none());
}

/// Forks while other threads take these locks all the time: `act` waits in a child for none of them.
fn ends_while(locks: Vec<Box<dyn Fn() + Send + '_>>, mut act: impl FnMut(u32)) {
    let stop = AtomicBool::new(false);
    let ended = thread::scope(|scope| {
        for take in locks {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    take();
                }
            });
        }
        let well = |status: &WaitStatus| matches!(status, WaitStatus::Exited(_, 0));
        let bad = (0..FORKS)
            .map(|fork| child(|| act(fork)))
            .find(|status| !well(status));
        stop.store(true, Ordering::Relaxed);
        bad
    });
    assert_eq!(ended, None);
}

/// Who closes, reclaims or looks.
fn ends_amid_locks(device: &Device) {
    // Of the life, and of its provider.
    ends_while(
        vec![
            Box::new(|| _ = device.objects()),
            Box::new(|| _ = device.link()),
        ],
        |fork| {
            looks(device);
            assert_eq!(device.reclaim(), 0);
            // SAFETY: as in the test, of another child.
            let device = unsafe { std::ptr::read(device) };
            let report = if fork % 2 == 0 {
                device.close()
            } else {
                device.give_back()
            };
            assert_eq!(report.left, []);
        },
    );
}

/// Keeps the lock of a pool's region.
fn counts(pool: &Pool) {
    for _ in 0..100 {
        let _ = pool.available();
    }
}

/// Who drops frames or a port, counts frames, or takes more of them than its pool has.
fn pool_ends_amid_locks(port: &mut Port) {
    let frames = port.take_frames(4).unwrap();
    let (one, two) = (port.pool().share(), port.pool().share());
    ends_while(
        vec![
            Box::new(move || counts(&one)),
            Box::new(move || counts(&two)),
        ],
        |fork| {
            let Census { total, home, out } = port.census().unwrap();
            assert_eq!((home, out), (0, total));
            assert!(port.take_frames(1 << 10).is_none());
            assert!(!format!("{:?}", port.pool().share()).is_empty());
            // SAFETY: as in the test, of another child.
            let frames = unsafe { std::ptr::read(&raw const frames) };
            // SAFETY: as above.
            let port = unsafe { std::ptr::read(&raw const *port) };
            if fork % 2 == 0 {
                drop((frames, port));
            } else {
                drop((port, frames));
            }
        },
    );
}

/// Who reads the accounts of DMA memory, or drops what has a line in them: mappings, regions, rings.
fn accounts_end_amid_locks() {
    let bench = Bench::new();
    let clock = Arc::new(ManualClock::default());
    let space = AddressSpace::new(bench.function.clone(), u64::MAX, clock).unwrap();
    let owner = |serial| ObjectId {
        device: DeviceId::fresh(),
        generation: Generation::FIRST,
        serial,
        kind: "test",
    };
    let mapping = space.map(owner(1), 1 << 12).unwrap();
    let memory = space.map(owner(2), 1 << 12).unwrap();
    let (region, mut pool) = FrameRegion::new(memory, FRAME, 16).unwrap();
    let ring = ExchangeRing::create(&space, owner(3), &mut pool, 8).unwrap();
    let ledger = space.ledger();
    assert!(ledger.totals().live_bytes > 0);
    let (one, two) = (pool.share(), pool.share());
    let look = |pool: &Pool| {
        let _ = (ledger.totals(), ledger.lines());
        counts(pool);
    };
    ends_while(
        vec![Box::new(move || look(&one)), Box::new(move || look(&two))],
        |_| {
            assert_eq!(ledger.totals().live_bytes, 0);
            assert_eq!(ledger.lines().len(), 0);
            assert!(mapping.is_shell() && region.unreferenced().is_none());
            assert!(!format!("{mapping:?} {region:?} {ring:?} {pool:?}").is_empty());
            // SAFETY: as in the test, of another child.
            drop(unsafe { std::ptr::read(&raw const mapping) });
            // SAFETY: as above.
            drop(unsafe { std::ptr::read(&raw const ring) });
            // SAFETY: as above.
            drop(unsafe { std::ptr::read(&raw const region) });
        },
    );
}

#[test]
fn c28_a_child_that_uses_or_drops_what_it_inherited_ends_and_harms_nobody() {
    let bench = Bench::of(|function| function.with_interrupts(2));
    let device = bench.open();
    let supervisor = Supervisor::new(&device, Policy::default()).unwrap();
    let mut port = Port::open(&device, &small()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let region = pd.register(2, 2048).unwrap();
    let (log, registers) = (bench.function.log(), bench.registers());

    let used = child(|| bursts(&device, &mut port));
    let made = child(|| {
        makes_nothing(&device, &pd);
        assert_eq!(bench.function.log(), log);
    });
    let unregistered = child(|| {
        // SAFETY: the child drops its copies, as a program that forks and returns does; those of
        // the parent are not moved.
        drop(unsafe { std::ptr::read(&raw const region) });
        // The child's copy of the function heard nothing: what a real one hears is the parent's.
        assert_eq!(bench.function.log(), log);
    });
    let dropped = child(|| {
        // SAFETY: a child of fork has its own copy of the three, of which this is the only use there:
        // it ends in `_exit`, which drops nothing. The parent's are in another process.
        let device = unsafe { std::ptr::read(&raw const device) };
        // SAFETY: as above.
        let port = unsafe { std::ptr::read(&raw const port) };
        // SAFETY: as above.
        let supervisor = unsafe { std::ptr::read(&raw const supervisor) };
        drops_everything(device, port, supervisor);
        assert_eq!(bench.function.log(), log);
    });
    let closed = child(|| {
        // SAFETY: as above, of another child.
        let device = unsafe { std::ptr::read(&raw const device) };
        assert_eq!(device.close().left, []);
        assert_eq!(bench.function.log(), log);
    });
    for ended in [used, made, unregistered, dropped, closed] {
        assert!(matches!(ended, WaitStatus::Exited(_, 0)), "{ended:?}");
    }
    ends_amid_locks(&device);
    pool_ends_amid_locks(&mut port);

    assert_eq!(device.broken(), None);
    assert_eq!(bench.function.log(), log);
    assert_eq!(bench.registers(), registers);
    assert_eq!(bench.receive(0, 3, 60), 3);
    let mut frames = port.take_frames(8).unwrap();
    assert_eq!(port.rx_burst(&mut frames), 3);
    accounts_end_amid_locks();
}
