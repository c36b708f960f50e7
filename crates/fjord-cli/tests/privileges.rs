//! Set-user-ID, set-group-ID and file capabilities go when somebody changes a file, as on Linux,
//! and what the kernel caches of a file's mode never outlives them. Needs root.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features,
    fjord_mount::FjordMount,
    image::Scratch,
    side_by_side::{self, shell},
    tools,
};

fn same(fjord_args: &[&str], steps: impl Fn(&Path) -> Result<String>) -> Result<()> {
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    side_by_side::same(program, "default", fjord_args, "acl", steps)
}

/// What is done to a file, by `$@` (nobody: root). `f` is a copy of id(1), `$size` bytes long.
const CHANGES: &str = r#"
    changed() {
        who="$@"
        case $change in
            append) tell $who sh -c 'printf x >>f' ;;
            twice) tell $who sh -c 'printf x >>f; printf y >>f' ;;
            # Opened by root.
            inherited) ( exec 3>>f; tell $who sh -c 'printf x >&3' ) ;;
            direct) tell $who xfs_io -d -c "pwrite -q $size 4096" f ;;
            falloc|falloc-k|fzero|fpunch) tell $who xfs_io -c "${change%-k} $keep $size 4096" f ;;
            copy) tell $who xfs_io -c "copy_range -s 0 -d $size -l 4096 other" f ;;
            mapped) tell $who xfs_io -c "mmap -rw 0 4096" -c "mwrite -S 0x7f 0 1" -c msync f ;;
            path) tell $who truncate -s 200000 f ;;
            open) tell $who xfs_io -c "truncate 200000" f ;;
            trunc) tell $who sh -c ': >f' ;;
            refill) tell $who sh -c 'cat other >f' ;;
            same-owner) tell $who chown 1000:50 f ;;
            group) tell $who chgrp 51 f ;;
            nothing) $who chown "" f 2>/dev/null ;;
            acl) tell $who setfacl -m u:7:rwx f ;;
        esac
    }
"#;

/// Each change, by members and others and root, to each mode: what stat tells at once, and whose
/// rights the file runs with.
fn each_change(dir: &Path, changes: &str) -> Result<String> {
    let script = format!(
        r#"
        {CHANGES}
        umask 0; size=$(( ($(stat -c %s /usr/bin/id) + 4095) / 4096 * 4096 ))
        cp /usr/bin/id other; truncate -s $size other
        for change in {changes}; do
            keep=; [ $change = falloc-k ] && keep=-k
            for mode in 6777 6767 2767; do for who in "as 1000 50" "as 1000 1000" ""; do
                [ $change = nothing ] && [ -z "$who" ] && continue
                rm -f f; cp other f; chown $owner:50 f
                # By such a chown FUSE in the kernel drops capabilities for anybody.
                [ $change = nothing ] || setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 f
                chmod $mode f
                as 1002 1002 ./f >/dev/null 2>&1
                echo "$change $mode"; changed $who
                [ $change = mapped ] || tell as 1002 50 ./f -ru; as 1002 50 ./f -u; as 1002 50 ./f -g
                stat -c '%a %u:%g' f; getfattr --absolute-names -n security.capability f 2>&1
                as 1002 50 ./f -u; changed $who; stat -c '%a %u:%g' f
            done; done
        done 2>&1 | sed 's/0x[0-9a-f]*$/mapped/'
        "#
    );
    Ok(shell(dir, &format!("owner=1000{script}"))? + &shell(dir, &format!("owner=0{script}"))?)
}

#[test]
fn writes() -> Result<()> {
    same(&[], |dir| each_change(dir, "append twice inherited direct copy refill mapped"))
}

#[test]
fn writes_behind_the_kernels_cache() -> Result<()> {
    same(&["--writeback-cache"], |dir| each_change(dir, "append twice direct copy refill"))
}

#[test]
fn sizes_and_space() -> Result<()> {
    same(&[], |dir| each_change(dir, "path open trunc falloc falloc-k fzero fpunch"))
}

#[test]
fn owners_and_lists() -> Result<()> {
    same(&[], |dir| each_change(dir, "same-owner group nothing acl"))
}

/// New files with set-group-ID in a directory with set-group-ID, by members of its group and others.
#[test]
fn new_files() -> Result<()> {
    same(&[], |dir| {
        shell(
            dir,
            r#"
            umask 0; mkdir d; chown 1000:50 d; chmod 2777 d
            for who in "as 1000 50" "as 1000 1000" "as 50 50" ""; do
                for mode in 2777 2767 2666; do
                    rm -f d/f; echo "$who $mode"
                    $who xfs_io -f -m 0$mode -c quit d/f
                    stat -c "%a %u:%g" d/f
                done
            done
            "#,
        )
    })
}

/// No program that starts after a write has returned has the owner's rights, while further
/// writes go on.
#[test]
fn no_exec_after_a_write_is_privileged() -> Result<()> {
    tools::require(&["setpriv"])?;
    let scratch = Scratch::in_memory("privileges")?;
    let img = scratch.join("image");
    features::by_name("default").context("a set of the table")?.make(&img)?;
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    let fjord = FjordMount::with_program(program, &img, &[])?;
    fs::set_permissions(fjord.path(), fs::Permissions::from_mode(0o755))?;
    let file = fjord.path().join("f");
    const TRY: &str = "[ $(./f -u) = 0 ] || exit 3; printf x >>f
        (for i in 1 2 3 4; do printf x >>f; done) &
        for i in 1 2 3 4 5 6; do ./f -u 2>/dev/null; done; wait; ./f -u";
    for round in 0..40 {
        fs::copy("/usr/bin/id", &file)?;
        std::os::unix::fs::chown(&file, Some(0), Some(50))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4775))?;
        let mut user = Command::new("setpriv");
        user.args(["--reuid=65534", "--regid=65534", "--groups=50", "sh", "-c", TRY]);
        let said = tools::run(user.current_dir(fjord.path()))?.ok()?.stdout;
        ensure!(said.ends_with("65534\n"), "round {round}: {said}");
        ensure!(said.lines().all(|line| line == "65534"), "round {round}: {said}");
    }
    fjord.unmount()
}

/// After each of these steps stat(2) tells the same as on Linux at once: what the kernel remembers
/// of a file is renewed.
#[test]
fn nothing_remembered_is_stale() -> Result<()> {
    same(&[], |dir| {
        shell(
            dir,
            r#"
            state() { for p in "$@"; do stat -c '%n %h %s %a %u %g|%z|%y' $p 2>/dev/null || echo 'gone||'; done; }
            moved() {
                paths="$1"; shift
                state $paths >/tmp/before.$$; sleep 0.012; "$@" 2>&1; state $paths >/tmp/after.$$
                echo "$ $*"
                paste -d'|' /tmp/before.$$ /tmp/after.$$ | awk -F'|' '{
                    print $4, ($1 == $4 ? "" : "was " $1), ($2 == $5 ? "" : "ctime"), ($3 == $6 ? "" : "mtime") }'
                rm -f /tmp/before.$$ /tmp/after.$$
            }
            umask 022; mkdir d e; echo content >f; ln -s f l; mkfifo p
            for p in d f; do
                moved $p chattr +d $p; moved $p chattr -d $p; moved $p setfattr -n user.a -v 1 $p
                moved $p setfattr -n user.a -v 2 $p; moved $p setfattr -x user.a $p
                moved $p setfacl -m u:5:rwx $p; moved $p chmod g-w $p; moved $p setfacl -b $p
                moved $p chown 5:6 $p; moved $p chmod 750 $p
            done
            moved d setfacl -d -m u:7:r d; moved d setfacl -k d
            moved "d d/a" touch d/a; moved "d f f2" ln f f2; moved "f f2 d" mv f2 d/f2
            moved "f d/f2 d" rm d/f2; moved "f d" mv f d/; moved ". d d/f" mv d/f f
            moved "d d/s" mkdir d/s; moved "d e d/s" mv d/s e/s; moved "e d e/s" mv -T e/s d/s
            moved "d d/s" rmdir d/s; moved "d l" mv l d/l; moved "d d/l" chown -h 5 d/l
            moved "f" truncate -s 5000 f; moved f xfs_io -c 'falloc 0 9000' f
            moved f xfs_io -c 'falloc -k 0 90000' f; moved f xfs_io -c 'fpunch 0 4096' f
            moved f sh -c 'printf x >>f'; moved f xfs_io -d -c 'pwrite -q 0 4096' f
            moved f xfs_io -c 'mmap -rw 0 4096' -c 'mwrite 0 9' -c 'msync -s' f
            echo other >g; moved "f g" mv -f g f; ln f g; moved "f g" chmod 600 g; moved "f g ." rm f
            "#,
        )
    })
}
