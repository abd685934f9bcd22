//! The guest kernel's log, and what in it means trouble.

/// What the guest's kernel logged.
#[derive(Clone, Debug, Default)]
pub struct KernelLog {
    /// Its records, oldest first.
    pub records: Vec<Record>,
}

/// One message of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// 0 (emergency) to 7 (debug).
    pub level: u8,
    /// Microseconds since the kernel started.
    pub microseconds: u64,
    /// The message.
    pub text: String,
}

impl KernelLog {
    /// Reads what /dev/kmsg gives: `priority,sequence,microseconds,flags;message`, then lines of details that begin with a space.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        Self {
            records: text.lines().filter_map(Record::parse).collect(),
        }
    }

    /// Records that contain `needle`.
    pub fn matching(&self, needle: &str) -> Vec<&Record> {
        self.records
            .iter()
            .filter(|record| record.text.contains(needle))
            .collect()
    }

    /// Records in which an IOMMU says that it stopped an access. The kernel limits their rate: presence counts, not number.
    pub fn iommu_faults(&self) -> Vec<&Record> {
        let is_fault = |text: &str| {
            let intel = text.contains("DMAR:")
                && (text.contains("[DMA ")
                    || text.contains("[INTR-REMAP]")
                    || text.contains("handling fault status"));
            let amd = text.contains("AMD-Vi: Event logged");
            let virtio = text.contains("virtio_iommu") && text.contains("fault");
            intel || amd || virtio
        };
        self.records
            .iter()
            .filter(|record| is_fault(&record.text))
            .collect()
    }

    /// Records in which the kernel says that it is broken itself.
    pub fn kernel_bugs(&self) -> Vec<&Record> {
        let signs = [
            "BUG:",
            "WARNING: ",
            "Oops",
            "Kernel panic",
            "blocked for more than",
            "stall",
            "general protection fault",
        ];
        self.records
            .iter()
            .filter(|record| {
                record.level <= 4 && signs.iter().any(|sign| record.text.contains(sign))
            })
            .collect()
    }

    /// The log as `dmesg` prints it.
    pub fn text(&self) -> String {
        let line = |record: &Record| {
            let (seconds, rest) = (
                record.microseconds / 1_000_000,
                record.microseconds % 1_000_000,
            );
            format!("[{seconds:5}.{rest:06}] {}\n", record.text)
        };
        self.records.iter().map(line).collect()
    }
}

impl Record {
    fn parse(line: &str) -> Option<Self> {
        let (head, text) = line.split_once(';')?;
        let mut fields = head.split(',');
        let priority: u32 = fields.next()?.parse().ok()?;
        let microseconds = fields.nth(1)?.parse().ok()?;
        Some(Self {
            level: (priority & 7) as u8,
            microseconds,
            text: text.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &[u8] = b"6,339,5140900,-;NET: Registered PF_INET6 protocol family\n\
        3,340,5690716,-;DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0x1000 [fault reason 0x05] PTE Write access is not set\n \
        SUBSYSTEM=pci\n DEVICE=+pci:0000:01:00.0\n\
        6,341,5700000,-;DMAR: Intel(R) Virtualization Technology for Directed I/O\n\
        4,342,5800000,-;WARNING: CPU: 0 PID: 1 at kernel/x.c:1\n";

    #[test]
    fn records_keep_level_time_and_text() {
        let log = KernelLog::parse(LOG);
        assert_eq!(log.records.len(), 4);
        assert_eq!(
            (log.records[1].level, log.records[1].microseconds),
            (3, 5_690_716)
        );
        assert!(log.text().starts_with("[    5.140900] NET: Registered"));
    }

    #[test]
    fn faults_are_told_from_the_iommus_greeting() {
        let log = KernelLog::parse(LOG);
        assert_eq!(log.iommu_faults(), [&log.records[1]]);
        assert_eq!(log.kernel_bugs(), [&log.records[3]]);
    }
}
