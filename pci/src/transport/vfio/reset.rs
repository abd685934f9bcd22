//! Resets through the kernel: by the method that it would choose, by one that we choose in sysfs,
//! and by a hot reset, where that touches nobody else.

use crate::address::Address;
use crate::capabilities::Capabilities;
use crate::sysfs::Sysfs;
use crate::transport::{ResetFailed, ResetMethod};

/// The best reset that a function's capabilities show, in the kernel's order of preference.
pub(crate) fn shown(capabilities: &Capabilities) -> ResetMethod {
    if capabilities.pcie.is_some_and(|pcie| pcie.flr) {
        ResetMethod::Flr
    } else if capabilities.advanced_features.is_some_and(|af| af.flr) {
        ResetMethod::AfFlr
    } else if capabilities.power.is_some_and(|power| !power.no_soft_reset) {
        ResetMethod::Pm
    } else {
        ResetMethod::Bus
    }
}

/// Where a function is: its address, and the sysfs that knows it.
#[derive(Debug)]
pub(crate) struct Place {
    sysfs: Sysfs,
    address: Address,
}

impl Place {
    pub(crate) fn new(sysfs: &Sysfs, address: Address) -> Self {
        Self {
            sysfs: sysfs.clone(),
            address,
        }
    }

    /// The function's name.
    pub(crate) fn name(&self) -> String {
        self.address.to_string()
    }

    /// The methods that the kernel has for a function that it can reset, in its order; `shown`
    /// alone where it does not say.
    pub(crate) fn methods(&self, shown: ResetMethod) -> Vec<ResetMethod> {
        match self.sysfs.reset_method(self.address) {
            Ok(text) => ResetMethod::parse_list(&text),
            Err(error) => {
                log::debug!("{error}");
                vec![shown]
            }
        }
    }

    /// Runs `reset` while `method` is the one that the kernel uses. What stood in sysfs before
    /// stands there again afterwards, unless this process is killed meanwhile.
    pub(crate) fn choose(
        &self,
        method: ResetMethod,
        shown: ResetMethod,
        reset: impl FnOnce() -> Result<(), ResetFailed>,
    ) -> Result<(), ResetFailed> {
        let choice = |source| ResetFailed::Choice {
            device: self.name(),
            method,
            source,
        };
        let former = match self.sysfs.reset_method(self.address) {
            Ok(text) => text,
            Err(_) if method == shown => return reset(),
            Err(error) => return Err(choice(error)),
        };
        // The word, not what we parsed: a later kernel may prefer a method that we do not know.
        if former.split_whitespace().next() == Some(method.name()) {
            return reset();
        }
        if !ResetMethod::parse_list(&former).contains(&method) {
            return Err(ResetFailed::NotOffered {
                device: self.name(),
                method,
            });
        }
        // Made before the write, which may fail half-way.
        let _restore = Restore {
            place: self,
            former: &former,
        };
        self.sysfs
            .set_reset_method(self.address, method.name())
            .map_err(choice)?;
        reset()
    }

    /// Checks that a hot reset, of which the kernel says that it touches these functions, touches
    /// this one and no other (C36).
    pub(crate) fn alone(&self, touched: &[[u32; 2]]) -> Result<(), ResetFailed> {
        let mut touched: Vec<Option<Address>> = touched.iter().map(dependent).collect();
        let before = touched.len();
        touched.retain(|address| *address != Some(self.address));
        let device = self.name();
        if !touched.is_empty() {
            let others = touched.into_iter().map(|address| match address {
                Some(address) => address.to_string(),
                None => "a function without an address".to_owned(),
            });
            let others = others.collect();
            return Err(ResetFailed::Touches { device, others });
        }
        if before == 0 {
            let source = std::io::Error::other("the kernel says that a hot reset touches nothing");
            return Err(ResetFailed::Failed { device, source });
        }
        Ok(())
    }
}

/// The address in a `struct vfio_pci_dependent_device`: group or device id; segment, bus, devfn.
fn dependent(words: &[u32; 2]) -> Option<Address> {
    let [low, high, bus, devfn] = words[1].to_ne_bytes();
    let segment = u16::from_ne_bytes([low, high]);
    Address::new(segment.into(), bus, devfn >> 3, devfn & 7)
}

/// Puts back what stood in `reset_method`, whatever happens: it holds for the whole machine.
struct Restore<'a> {
    place: &'a Place,
    former: &'a str,
}

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        let Place { sysfs, address } = self.place;
        if sysfs
            .reset_method(*address)
            .is_ok_and(|now| now == self.former)
        {
            return;
        }
        if let Err(error) = sysfs.set_reset_method(*address, self.former) {
            log::error!(
                "{address}: its reset_method is changed and could not be restored; write '{}' to it: {error}",
                self.former
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use nix::errno::Errno;
    use tempfile::TempDir;

    use super::*;

    const ADDRESS: &str = "0000:02:00.0";

    /// A function whose kernel knows these resets.
    struct Machine {
        root: TempDir,
        place: Place,
    }

    impl Machine {
        fn new(methods: Option<&str>) -> Self {
            let root = tempfile::tempdir().unwrap();
            let address: Address = ADDRESS.parse().unwrap();
            let sysfs = Sysfs::under(root.path()).with_write(|path, text| fs::write(path, text));
            let machine = Self {
                place: Place::new(&sysfs, address),
                root,
            };
            fs::create_dir_all(machine.file().parent().unwrap()).unwrap();
            if let Some(methods) = methods {
                fs::write(machine.file(), methods).unwrap();
            }
            machine
        }

        fn file(&self) -> std::path::PathBuf {
            let device = self.root.path().join("sys/bus/pci/devices").join(ADDRESS);
            device.join("reset_method")
        }

        fn text(&self) -> String {
            fs::read_to_string(self.file()).unwrap().trim().to_owned()
        }

        /// Chooses a method, and returns what stood in sysfs when the reset ran.
        fn choose(&self, method: ResetMethod) -> (Result<(), ResetFailed>, Option<String>) {
            let mut during = None;
            let result = self.place.choose(method, ResetMethod::Flr, || {
                during = Some(self.text());
                Ok(())
            });
            (result, during)
        }
    }

    #[test]
    fn the_kernels_order_is_reported() {
        let machine = Machine::new(Some("pm bus\n"));
        assert_eq!(
            machine.place.methods(ResetMethod::Flr),
            [ResetMethod::Pm, ResetMethod::Bus]
        );
    }

    #[test]
    fn a_kernel_that_does_not_say_has_what_the_capabilities_show() {
        let machine = Machine::new(None);
        assert_eq!(machine.place.methods(ResetMethod::Flr), [ResetMethod::Flr]);
        let reset = |method| machine.place.choose(method, ResetMethod::Flr, || Ok(()));
        reset(ResetMethod::Flr).unwrap();
        assert!(matches!(
            reset(ResetMethod::Bus),
            Err(ResetFailed::Choice { .. })
        ));
    }

    #[test]
    fn the_first_method_is_used_without_touching_sysfs() {
        let mut machine = Machine::new(Some("flr pm bus\n"));
        let refuse = |_: &_, _: &_| Err(io::Error::from(Errno::EACCES));
        machine.place.sysfs = machine.place.sysfs.with_write(refuse);
        let (result, during) = machine.choose(ResetMethod::Flr);
        result.unwrap();
        assert_eq!(during.as_deref(), Some("flr pm bus"));
    }

    #[test]
    fn another_method_is_chosen_for_the_reset_alone() {
        let machine = Machine::new(Some("pm bus\n"));
        let (result, during) = machine.choose(ResetMethod::Bus);
        result.unwrap();
        assert_eq!(during.as_deref(), Some("bus"));
        assert_eq!(machine.text(), "pm bus");
    }

    #[test]
    fn the_choice_is_restored_after_a_reset_that_failed() {
        let machine = Machine::new(Some("pm bus\n"));
        let failed = || Err(ResetFailed::new(ADDRESS, Errno::ENOTTY.into()));
        let result = machine
            .place
            .choose(ResetMethod::Bus, ResetMethod::Pm, failed);
        assert!(matches!(result, Err(ResetFailed::Failed { .. })));
        assert_eq!(machine.text(), "pm bus");
    }

    #[test]
    fn the_choice_is_restored_after_a_panic() {
        let machine = Machine::new(Some("pm bus\n"));
        let panics = || panic!("in the reset");
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            machine
                .place
                .choose(ResetMethod::Bus, ResetMethod::Pm, panics)
        }));
        assert!(unwound.is_err());
        assert_eq!(machine.text(), "pm bus");
    }

    #[test]
    fn a_choice_that_is_refused_resets_nothing() {
        let mut machine = Machine::new(Some("pm bus\n"));
        let refuse = |_: &_, _: &_| Err(io::Error::from(Errno::EACCES));
        machine.place.sysfs = machine.place.sysfs.with_write(refuse);
        let (result, during) = machine.choose(ResetMethod::Bus);
        let error = result.unwrap_err();
        assert!(error.to_string().contains("it takes root"), "{error}");
        assert_eq!(during, None);
    }

    #[test]
    fn a_method_that_the_kernel_does_not_have_is_not_tried() {
        let machine = Machine::new(Some("pm bus\n"));
        for method in [ResetMethod::Flr, ResetMethod::Server, ResetMethod::Software] {
            let (result, during) = machine.choose(method);
            assert!(matches!(result, Err(ResetFailed::NotOffered { .. })));
            assert_eq!(during, None);
        }
    }

    /// As the kernel lists it.
    fn touched(segment: u16, bus: u8, devfn: u8) -> [u32; 2] {
        let [low, high] = segment.to_ne_bytes();
        [7, u32::from_ne_bytes([low, high, bus, devfn])]
    }

    #[test]
    fn c36_a_hot_reset_that_touches_a_sibling_is_refused_by_its_name() {
        let place = Machine::new(None).place;
        let error = place
            .alone(&[touched(0, 2, 0), touched(0, 2, 1)])
            .unwrap_err();
        assert!(matches!(error, ResetFailed::Touches { .. }));
        let text = error.to_string();
        assert!(text.contains("also reset 0000:02:00.1"), "{text}");
    }

    #[test]
    fn c36_the_same_bus_of_another_segment_is_another_function() {
        let place = Machine::new(None).place;
        assert!(place.alone(&[touched(1, 2, 0)]).is_err());
        assert!(place.alone(&[]).is_err());
    }

    #[test]
    fn a_hot_reset_of_this_function_alone_is_done() {
        let place = Machine::new(None).place;
        place.alone(&[touched(0, 2, 0)]).unwrap();
    }
}
