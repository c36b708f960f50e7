//! The conditions of the decision table: the rows of each question that the scan asks.
//!
//! Owns the priority of the rows: a row's condition excludes those of all other rows of its question,
//! so that their order means nothing. Invariant: to each legal finding exactly one row of its question
//! applies; the tests enumerate all findings, and debug builds check each decision.

use fjord_format::jbd2::ChecksumVersion;

use super::cases::Case;

/// A row of a question and its condition; `None` is the row without a number: the scan continues.
pub(super) type Row<F> = (Option<Case>, fn(&F) -> bool);

/// The row that applies to a finding.
fn decide<F: std::fmt::Debug>(rows: &[Row<F>], finding: &F) -> Option<Case> {
    let mut applying = rows.iter().filter(|(_, applies)| applies(finding));
    let row = applying.next();
    debug_assert!(row.is_some() && applying.next().is_none(), "not one row for {finding:?}");
    row.and_then(|&(case, _)| case)
}

/// A question of the scan: the facts of a finding, the legal findings, the rows.
macro_rules! question {
    (
        $(#[$doc:meta])*
        $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* }
        legal: $legal:expr;
        $($case:expr => $applies:expr;)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) struct $name {
            $($(#[$field_doc])* pub(super) $field: $kind,)*
        }

        impl $name {
            const ROWS: &[Row<$name>] = &[$(($case, $applies)),*];

            /// The row that applies; `None` if the scan continues without a row.
            pub(super) fn decide(&self) -> Option<Case> {
                decide(Self::ROWS, self)
            }
        }

        #[cfg(test)]
        impl tests::Question for $name {
            const ROWS: &'static [Row<$name>] = $name::ROWS;

            fn is_legal(&self) -> bool {
                let legal: fn(&$name) -> bool = $legal;
                legal(self)
            }

            fn all() -> Vec<$name> {
                let count: usize = [$(<$kind as tests::Domain>::VALUES.len()),*].iter().product();
                let nth = |mut rest: usize| $name {
                    $($field: tests::value(&mut rest),)*
                };
                (0..count).map(nth).collect()
            }
        }
    };
}

/// Block type of a block where a header must stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderKind {
    /// No magic number.
    NoMagic,
    /// The magic number and an unknown type.
    Unknown,
    /// A superblock.
    Superblock,
    /// A descriptor, revoke or commit block.
    Log,
}

/// The relation of the revokes to a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RevokedBy {
    Nothing,
    /// A revoke of an earlier transaction.
    Earlier,
    /// A revoke of the same or a later transaction.
    SameOrLater,
}

question! {
    /// Is there anything in the log?
    Contents {
        /// `s_start` is set.
        dirty: bool,
        /// The log has a complete transaction.
        complete: bool,
    }
    legal: |it| it.dirty || !it.complete;
    Some(Case::Clean) => |it| !it.dirty;
    Some(Case::EmptyLog) => |it| it.dirty && !it.complete;
    None => |it| it.dirty && it.complete;
}

question! {
    /// Does the log go on with this block?
    Header {
        kind: HeaderKind,
        /// The block has the ID of the expected transaction.
        expected: bool,
    }
    legal: |_| true;
    Some(Case::NoHeader) => |it| it.kind == HeaderKind::NoMagic;
    Some(Case::StaleSequence) => |it| {
        matches!(it.kind, HeaderKind::Superblock | HeaderKind::Log) && !it.expected
    };
    Some(Case::UnknownBlockType) => |it| {
        it.kind == HeaderKind::Unknown || it.kind == HeaderKind::Superblock && it.expected
    };
    None => |it| it.kind == HeaderKind::Log && it.expected;
}

question! {
    /// Why has a transaction no commit block where the walk has ended?
    Tail {
        /// The walk has ended because it has read as many blocks as the log has.
        lapped: bool,
        /// The walk has read blocks of the transaction.
        begun: bool,
        /// Descriptors and revoke blocks have checksums.
        checksums: bool,
        /// One of them is wrong.
        bad_block: bool,
        /// The log has a commit block of the transaction, which proves that its blocks had been
        /// flushed: never under async commit.
        committed: bool,
    }
    legal: |it| !it.bad_block || it.begun && it.checksums;
    Some(Case::BadDescriptorCommitted) => |it| it.bad_block && it.committed;
    Some(Case::BadDescriptorTorn) => |it| it.bad_block && !it.committed;
    Some(Case::WholeLap) => |it| {
        !it.bad_block && it.lapped && (!it.begun || it.checksums || it.committed)
    };
    Some(Case::TornLap) => |it| {
        !it.bad_block && it.lapped && it.begun && !it.checksums && !it.committed
    };
    Some(Case::TornTransaction) => |it| !it.bad_block && !it.lapped && it.begun;
    None => |it| !it.bad_block && !it.lapped && !it.begun;
}

question! {
    /// Does a commit block complete its transaction?
    Commit {
        /// A descriptor or revoke block of the transaction has a wrong checksum.
        bad_block: bool,
        /// The commit block is older than the one before.
        stale: bool,
        /// The commit block's checksum is right.
        checksum_holds: bool,
        /// The log has async commits.
        is_async: bool,
        /// An earlier transaction was torn.
        failed_before: bool,
        /// A revoke block of the transaction has an impossible count.
        bad_revoke: bool,
    }
    legal: |it| it.is_async || !it.failed_before;
    Some(Case::BadDescriptorStale) => |it| it.bad_block && it.stale;
    Some(Case::BadDescriptorCommitted) => |it| it.bad_block && !it.stale && !it.is_async;
    Some(Case::BadCommitStale) => |it| !it.bad_block && !it.checksum_holds && it.stale;
    Some(Case::BadCommit) => |it| {
        !it.bad_block && !it.checksum_holds && !it.stale && !it.is_async
    };
    Some(Case::AsyncCommitTorn) => |it| {
        (it.bad_block || !it.checksum_holds) && !it.stale && it.is_async && !it.failed_before
    };
    Some(Case::AsyncCommitCorrupt) => |it| {
        let valid = !it.bad_block && it.checksum_holds;
        it.failed_before && (valid || !it.stale)
    };
    Some(Case::BadRevokeCount) => |it| {
        !it.bad_block && it.checksum_holds && !it.failed_before && it.bad_revoke
    };
    Some(Case::Complete) => |it| {
        !it.bad_block && it.checksum_holds && !it.failed_before && !it.bad_revoke
    };
}

question! {
    /// Is a commit block valid only by a special rule?
    CommitForm {
        checksum: ChecksumVersion,
        /// The checksum's type is 0.
        no_checksum: bool,
        /// There is something after the structure.
        rest_used: bool,
    }
    legal: |_| true;
    Some(Case::CommitWithoutChecksum) => |it| {
        it.checksum == ChecksumVersion::V1 && it.no_checksum
    };
    Some(Case::PartialCommitBlock) => |it| {
        matches!(it.checksum, ChecksumVersion::V2 | ChecksumVersion::V3) && it.rest_used
    };
    None => |it| match it.checksum {
        ChecksumVersion::None => true,
        ChecksumVersion::V1 => !it.no_checksum,
        ChecksumVersion::V2 | ChecksumVersion::V3 => !it.rest_used,
    };
}

question! {
    /// Is the last transaction torn, under async commit?
    AsyncTail {
        is_async: bool,
        /// A descriptor, revoke or commit block was wrong.
        failed: bool,
        /// The last complete transaction has a copy with a wrong checksum.
        bad_data: bool,
    }
    legal: |it| it.is_async || !it.failed;
    Some(Case::AsyncCommitTorn) => |it| it.is_async && (it.failed || it.bad_data);
    None => |it| !it.is_async || !it.failed && !it.bad_data;
}

question! {
    /// Do the fast commits count?
    FastCommits {
        /// The log has an area.
        area: bool,
        /// Those of the next transaction have unknown features.
        unknown: bool,
        /// There are records of the next transaction.
        records: bool,
    }
    legal: |it| it.area || !it.unknown && !it.records;
    Some(Case::BadFastCommit) => |it| it.area && it.unknown;
    Some(Case::FastCommit) => |it| it.area && !it.unknown && it.records;
    Some(Case::NoFastCommit) => |it| it.area && !it.unknown && !it.records;
    None => |it| !it.area;
}

question! {
    /// Does a revoke exclude a copy?
    Revocation {
        by: RevokedBy,
    }
    legal: |_| true;
    Some(Case::Revoked) => |it| it.by == RevokedBy::SameOrLater;
    Some(Case::RevokedBefore) => |it| it.by == RevokedBy::Earlier;
    None => |it| it.by == RevokedBy::Nothing;
}

question! {
    /// May a copy that no revoke excludes be written?
    LoggedCopy {
        checksum_holds: bool,
        /// Its home is past the end of the device.
        outside: bool,
        /// Its home is a block of the journal.
        in_journal: bool,
    }
    legal: |it| !it.outside || !it.in_journal;
    Some(Case::BadDataChecksum) => |it| !it.checksum_holds;
    Some(Case::OutsideDevice) => |it| it.checksum_holds && it.outside;
    Some(Case::InsideJournal) => |it| it.checksum_holds && it.in_journal;
    None => |it| it.checksum_holds && !it.outside && !it.in_journal;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Debug;

    use super::*;

    /// All values of a fact.
    pub(super) trait Domain: Copy + 'static {
        const VALUES: &'static [Self];
    }

    impl Domain for bool {
        const VALUES: &'static [bool] = &[false, true];
    }

    impl Domain for HeaderKind {
        const VALUES: &'static [HeaderKind] =
            &[HeaderKind::NoMagic, HeaderKind::Unknown, HeaderKind::Superblock, HeaderKind::Log];
    }

    impl Domain for RevokedBy {
        const VALUES: &'static [RevokedBy] =
            &[RevokedBy::Nothing, RevokedBy::Earlier, RevokedBy::SameOrLater];
    }

    impl Domain for ChecksumVersion {
        const VALUES: &'static [ChecksumVersion] =
            &[ChecksumVersion::None, ChecksumVersion::V1, ChecksumVersion::V2, ChecksumVersion::V3];
    }

    /// The value of the lowest digit of `rest`, which it loses.
    pub(super) fn value<T: Domain>(rest: &mut usize) -> T {
        let value = T::VALUES[*rest % T::VALUES.len()];
        *rest /= T::VALUES.len();
        value
    }

    pub(super) trait Question: Debug + Sized + 'static {
        const ROWS: &'static [Row<Self>];

        fn is_legal(&self) -> bool;
        fn all() -> Vec<Self>;
    }

    /// The faults of a table over all `findings`: overlaps, gaps, rows that never apply.
    fn faults<F: Debug>(rows: &[Row<F>], findings: &[F]) -> Vec<String> {
        let mut faults = Vec::new();
        let mut met = BTreeSet::new();
        for finding in findings {
            let applying: Vec<_> = rows
                .iter()
                .filter(|(_, applies)| applies(finding))
                .map(|&(case, _)| case)
                .collect();
            met.extend(applying.iter().copied());
            if applying.len() != 1 {
                faults.push(format!("{applying:?} apply to {finding:?}"));
            }
        }
        let dead = rows.iter().filter(|(case, _)| !met.contains(case));
        faults.extend(dead.map(|(case, _)| format!("{case:?} never applies")));
        faults
    }

    /// Checks a question; returns its rows.
    fn check<Q: Question>() -> Vec<Case> {
        let legal: Vec<Q> = Q::all().into_iter().filter(Q::is_legal).collect();
        assert_eq!(faults(Q::ROWS, &legal), Vec::<String>::new());
        Q::ROWS.iter().filter_map(|&(case, _)| case).collect()
    }

    #[test]
    fn exactly_one_row_applies_to_each_finding() {
        let questions = [
            check::<Contents>(),
            check::<Header>(),
            check::<Tail>(),
            check::<Commit>(),
            check::<CommitForm>(),
            check::<AsyncTail>(),
            check::<FastCommits>(),
            check::<Revocation>(),
            check::<LoggedCopy>(),
        ];
        // Rows of one condition each, which apply beside any other.
        let beside = [
            Case::VersionOne,
            Case::ErrorRecorded,
            Case::Wrapped,
            Case::Superseded,
            Case::Escaped,
            Case::ReadError,
        ];
        // `a_superblock_has_one_row_of_refusal` in `recovery/tests.rs`.
        let superblock = [Case::BadGeometry, Case::BadSuperblock, Case::UnknownFeature];
        let asked: BTreeSet<Case> =
            questions.into_iter().flatten().chain(beside).chain(superblock).collect();
        assert_eq!(asked, Case::ALL.iter().copied().collect(), "rows without a question");
    }

    #[test]
    fn a_finding_is_enumerated_once_with_each_value() {
        assert_eq!(Commit::all().len(), 1 << 6);
        assert_eq!(CommitForm::all().len(), 4 << 2);
        let all = Header::all();
        assert_eq!(all.len(), 4 << 1);
        assert!(all.iter().enumerate().all(|(index, finding)| !all[..index].contains(finding)));
    }

    #[test]
    fn overlaps_gaps_and_dead_rows_are_faults() {
        let overlap: &[Row<bool>] = &[(Some(Case::Clean), |_| true), (None, |&it| it)];
        assert_eq!(faults(overlap, bool::VALUES), ["[Some(Clean), None] apply to true"]);
        let gap: &[Row<bool>] = &[(Some(Case::Clean), |&it| it)];
        assert_eq!(faults(gap, bool::VALUES), ["[] apply to false"]);
        let dead: &[Row<bool>] = &[(Some(Case::Clean), |_| true), (None, |_| false)];
        assert_eq!(faults(dead, bool::VALUES), ["None never applies"]);
    }
}
