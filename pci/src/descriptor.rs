//! Descriptors that keep a device alive: closed in every child of fork, and on request.
//!
//! The *last* reference to a VFIO file stops the device (R12), so a child of fork that merely
//! inherited one keeps a killed parent's device running (C39). Every such descriptor is in a table;
//! in a child, a handler (`pthread_atfork(3)`) replaces each by one that is good for nothing. It is
//! replaced and not closed, so that its number, which the child's copies of our objects know, is
//! not given to another file.
//!
//! What this cannot see: `clone(2)` called directly, which runs no handlers; and a fork in the
//! moment between the kernel's making of a descriptor and its entry here.
#![expect(
    unsafe_code,
    reason = "replaces open descriptors, and runs in a child of fork"
)]

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

/// A descriptor of a device, a group, a container, an iommufd or a vfio-user server.
///
/// # Invariants
///
/// `slot` holds the number of `file` as long as `self` lives, and nobody else changes it.
#[derive(Debug)]
pub(crate) struct Descriptor {
    file: File,
    slot: &'static Slot,
    hung_up: AtomicBool,
}

impl Descriptor {
    /// Takes over an open descriptor.
    ///
    /// # Errors
    ///
    /// When the table cannot be set up: `/dev/null` is missing, or no descriptors or memory are left.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        let slot = Table::get()?.enter(fd.as_raw_fd());
        Ok(Self {
            file: File::from(fd),
            slot,
            hung_up: AtomicBool::new(false),
        })
    }

    /// The descriptor as a file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Whether it was closed by [`Descriptor::hang_up`].
    pub(crate) fn is_hung_up(&self) -> bool {
        self.hung_up.load(Ordering::Acquire)
    }

    /// Closes what it is a descriptor of, also while others borrow it: from then on every use of it
    /// fails with EBADF. A call that is inside the kernel keeps its reference until it returns.
    pub(crate) fn hang_up(&self) {
        if self.hung_up.swap(true, Ordering::AcqRel) {
            return;
        }
        let Some(table) = TABLE.get() else {
            return; // Cannot be: `new` made it.
        };
        if let Err(errno) = replace(self.file.as_raw_fd(), table.nothing.as_raw_fd()) {
            log::error!("a device's descriptor could not be closed: {errno}");
        }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // First, so that a fork at any moment finds the device in the table, or closed.
        self.hang_up();
        self.slot.leave();
    }
}

/// Makes `fd` a descriptor of what `by` is one of, closing what it was.
fn replace(fd: RawFd, by: RawFd) -> Result<(), Errno> {
    // SAFETY: `fd` is open and ours (INVARIANT of `Descriptor`, or of a slot in use); whoever
    // borrows it goes on to borrow an open descriptor. Only a system call: runs in a fork's child.
    match unsafe { libc::dup3(by, fd, libc::O_CLOEXEC) } {
        -1 => Err(Errno::last()),
        _ => Ok(()),
    }
}

/// One line of the table. Never freed, so that a child can walk it whatever the other threads of
/// its parent were doing.
#[derive(Debug)]
struct Slot {
    /// The descriptor; -1 while there is none.
    fd: AtomicI32,
    taken: AtomicBool,
    next: AtomicPtr<Slot>,
}

impl Slot {
    fn leave(&self) {
        self.fd.store(-1, Ordering::Release);
        self.taken.store(false, Ordering::Release);
    }
}

/// The head of the list of slots, which only grows.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

fn slots() -> impl Iterator<Item = &'static Slot> {
    let follow = |link: &'static AtomicPtr<Slot>| {
        // SAFETY: the list holds leaked slots only, published with Release.
        unsafe { link.load(Ordering::Acquire).as_ref() }
    };
    std::iter::successors(follow(&SLOTS), move |slot| follow(&slot.next))
}

/// That the handler is installed, and what descriptors are replaced by.
struct Table {
    /// Opened with O_PATH: every read, write, ioctl and mmap of it fails.
    nothing: OwnedFd,
}

static TABLE: OnceLock<Table> = OnceLock::new();

impl Table {
    fn get() -> io::Result<&'static Self> {
        static INSTALLED: OnceLock<c_int> = OnceLock::new();
        let table = match TABLE.get() {
            Some(table) => table,
            None => {
                let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
                let nothing = nix::fcntl::open("/dev/null", flags, Mode::empty())?;
                TABLE.get_or_init(|| Self { nothing })
            }
        };
        let installed = INSTALLED.get_or_init(|| {
            // SAFETY: `in_child` is async-signal-safe, and lives as long as the program.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
        });
        match *installed {
            0 => Ok(table),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn enter(&self, fd: RawFd) -> &'static Slot {
        let free = slots().find(|slot| !slot.taken.swap(true, Ordering::AcqRel));
        let slot = free.unwrap_or_else(|| {
            let slot = Box::leak(Box::new(Slot {
                fd: AtomicI32::new(-1),
                taken: AtomicBool::new(true),
                next: AtomicPtr::new(ptr::null_mut()),
            }));
            let mut head = SLOTS.load(Ordering::Acquire);
            loop {
                slot.next.store(head, Ordering::Relaxed);
                match SLOTS.compare_exchange(head, slot, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => break slot,
                    Err(now) => head = now,
                }
            }
        });
        slot.fd.store(fd, Ordering::Release);
        slot
    }
}

/// Runs in every child of fork, on its only thread: atomic loads and system calls only.
extern "C" fn in_child() {
    let Some(table) = TABLE.get() else { return };
    let nothing = table.nothing.as_raw_fd();
    for slot in slots() {
        let fd = slot.fd.load(Ordering::Acquire);
        if fd >= 0 && replace(fd, nothing).is_err() {
            // Nothing left but to close it.
            // SAFETY: the slot's descriptor, which the child has no use for.
            unsafe { libc::close(fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn c15_hanging_up_closes_a_descriptor_that_is_borrowed() {
        let (mine, peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let descriptor = Descriptor::new(mine.into()).unwrap();
        let borrowed = descriptor.as_fd();
        descriptor.hang_up();
        // The other end sees that it is closed, although `borrowed` is still there.
        assert_eq!(nix::unistd::read(&peer, &mut [0]), Ok(0));
        assert_eq!(nix::unistd::write(borrowed, &[1]), Err(Errno::EBADF));
    }

    #[test]
    fn c15_no_access_after_hanging_up_succeeds() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16).unwrap();
        let descriptor = Descriptor::new(file.into()).unwrap();
        descriptor.hang_up();
        descriptor.hang_up();
        let errno = |result: io::Result<usize>| result.unwrap_err().raw_os_error();
        let ebadf = Some(Errno::EBADF as i32);
        assert_eq!(errno(descriptor.file().read_at(&mut [0], 0)), ebadf);
        assert_eq!(errno(descriptor.file().write_at(&[0], 0)), ebadf);
    }

    #[test]
    fn slots_are_used_again() {
        let open = || Descriptor::new(tempfile::tempfile().unwrap().into()).unwrap();
        let before = {
            let all: Vec<_> = (0..8).map(|_| open()).collect();
            all.len() + slots().count()
        };
        for _ in 0..100 {
            drop(open());
        }
        assert!(slots().count() <= before + 32, "{}", slots().count());
    }
}
