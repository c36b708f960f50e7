//! The figures in virtual time: the shape of the paper's comes out, twice the same.

use fjord_bench::{Figure, FigureReport, Ordering, run_figure};

fn percent(report: &FigureReport, profile: &str, ordering: Ordering) -> f64 {
    let of = |row: &&fjord_bench::FigureRow| row.profile == profile && row.ordering == ordering;
    report.rows.iter().find(of).expect("all devices and orderings are there").percent_of_orderless
}

/// With the barrier writes going through the epoch scheduler.
#[test]
fn figure_9_has_the_shape_of_the_paper() {
    let report = run_figure(Figure::Barrier9).unwrap();
    println!("{}", report.to_table());
    for (profile, flush, barrier) in
        [("ufs", 10.0, 80.0), ("plain-ssd", 0.5, 90.0), ("supercap-ssd", 35.0, 90.0)]
    {
        let of = |ordering| percent(&report, profile, ordering);
        assert!((of(Ordering::TransferAndFlush) / flush - 1.0).abs() < 0.1, "{profile}");
        assert!(of(Ordering::WaitOnTransfer) < 40.0, "{profile}");
        assert!((of(Ordering::Barrier) - barrier).abs() < 4.0, "{profile}");
    }
    assert!(percent(&report, "nvme", Ordering::Barrier) > 85.0);
}

/// Virtual time is the same everywhere, so the page can be held to it.
#[test]
fn the_page_shows_these_figures() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks.md");
    let page = std::fs::read_to_string(page).unwrap();
    let table = run_figure(Figure::Barrier9).unwrap().to_table();
    assert!(
        page.contains(table.trim()),
        "docs/benchmarks.md shows other figures: put the output of `fjord bench --figure \
         barrier-9` there, and draw its SVGs again\n{table}"
    );
}

#[test]
fn figure_10_shows_full_queues_with_barriers_and_one_command_without() {
    let report = run_figure(Figure::Barrier10).unwrap();
    for row in report.rows.iter().filter(|row| row.profile != "disk") {
        let most = row.queue_depth_over_time.iter().map(|(_, depth)| *depth).max().unwrap();
        match row.ordering {
            Ordering::WaitOnTransfer | Ordering::TransferAndFlush => {
                assert_eq!((row.queue_depth_max, most), (1, 1), "{}", row.profile);
            }
            Ordering::Barrier | Ordering::Orderless => {
                assert_eq!(
                    (row.queue_depth_max, most),
                    (row.queue_depth as usize, row.queue_depth)
                );
                assert!(row.queue_depth_mean > 0.9 * f64::from(row.queue_depth), "{}", row.profile);
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("figure.svg");
    report.write_svg(&path).unwrap();
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.contains("plain-ssd") && svg.contains("wait-on-transfer"));
}

#[test]
fn the_same_figure_comes_out_twice() {
    let twice = [(); 2].map(|()| run_figure(Figure::Barrier9).unwrap().to_json());
    assert_eq!(twice[0], twice[1]);
}
