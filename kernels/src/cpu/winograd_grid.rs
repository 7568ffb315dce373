//! The order of Winograd's tiles, and images of which a ring holds what the next tiles read.
//!
//! Tiles are numbered through all planes of all images: stripe by stripe, and in a stripe row by row. Bands, a run of tiles
//! each, are blocks of a wide image then, not lines, so that few pixels are read by more than one of them.

use super::conv::Conv;
use crate::dtype::DType;

/// Tiles side by side of a stripe, where there are more than twice as many.
const STRIPE: usize = 16;

/// How the tiles of an image lie.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    /// Planes of all images, and tiles along height and width of one.
    planes: usize,
    rows: usize,
    cols: usize,
    /// Tiles side by side of every stripe but the last, and number of stripes.
    stripe: usize,
    stripes: usize,
    /// Side of a tile's results.
    o: usize,
}

/// Where a tile lies.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub plane: usize,
    pub row: usize,
    pub col: usize,
    stripe: usize,
    /// Tiles of its row that follow in its stripe, with it.
    pub rest: usize,
}

impl Grid {
    pub fn new(conv: &Conv, o: usize) -> Grid {
        let [depth, height, width] = conv.output;
        let (rows, cols) = (height.div_ceil(o), width.div_ceil(o));
        let stripe = if cols > 2 * STRIPE { STRIPE } else { cols.max(1) };
        Grid { planes: conv.batch * depth, rows, cols, stripe, stripes: cols.div_ceil(stripe), o }
    }

    /// Number of tiles.
    pub fn tiles(&self) -> usize {
        self.planes * self.rows * self.cols
    }

    pub fn place(&self, tile: usize) -> Place {
        let of_plane = self.rows * self.cols;
        let (plane, at) = (tile / of_plane, tile % of_plane);
        let stripe = at / (self.rows * self.stripe);
        let first = stripe * self.stripe;
        let width = self.stripe.min(self.cols - first);
        let at = at - self.rows * first;
        Place { plane, row: at / width, col: first + at % width, stripe, rest: width - at % width }
    }

    /// The first pixel of each row that a stripe's tiles read, and where these end.
    fn columns(&self, conv: &Conv, stripe: usize) -> [usize; 2] {
        let first = stripe * self.stripe;
        let inside = |x: usize| (x as isize - conv.padding[2]).clamp(0, conv.input[2] as isize) as usize;
        [inside(first * self.o), inside(self.cols.min(first + self.stripe) * self.o + 2)]
    }

    /// The rows that tiles read, as numbers among those of all stripes: from the first to before the second.
    fn rows_of(&self, conv: &Conv, first: usize, tiles: usize) -> [usize; 2] {
        let row = |tile: usize, of_tile: usize| {
            let Place { plane, row, stripe, .. } = self.place(tile);
            let y = (row * self.o + of_tile) as isize - conv.padding[1];
            (plane * self.stripes + stripe) * conv.input[1] + y.clamp(0, conv.input[1] as isize) as usize
        };
        [row(first, 0), row(first + tiles - 1, self.o + 2)]
    }

    /// The ring for an image that is read once, in bands of so many tiles: by a kernel of one plane, and as it is.
    pub fn ring(&self, conv: &Conv, band: usize) -> Ring {
        let bands = (0..self.tiles()).step_by(band.max(1));
        let rows = bands.map(|first| self.rows_of(conv, first, band.min(self.tiles() - first)));
        let widths = (0..self.stripes).map(|stripe| self.columns(conv, stripe)).map(|[from, end]| end - from);
        Ring {
            rows: rows.map(|[from, end]| end - from).max().unwrap_or(0),
            row: widths.max().unwrap_or(0) * conv.in_channels,
        }
    }
}

/// The image of a convolution.
#[derive(Clone, Copy)]
pub struct Image<'a> {
    /// Its first element, or that of the ring.
    pub ptr: *const u8,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// What makes it, if a ring holds what is read of it next.
    pub made: Option<Made<'a>>,
}

impl From<(*const u8, DType)> for Image<'_> {
    fn from((ptr, dtype): (*const u8, DType)) -> Self {
        Image { ptr, dtype, made: None }
    }
}

/// Memory for the rows of stripes that a band of tiles reads: row `g` of those of all stripes at place `g % rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Rows.
    pub rows: usize,
    /// Elements from one to the next.
    pub row: usize,
}

impl Ring {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows * self.row
    }
}

/// An image that is made while it is read.
#[derive(Clone, Copy)]
pub struct Made<'a> {
    /// As [`ring`](super::conv_winograd::ring) says.
    pub ring: Ring,
    /// Makes a part of the image: all channels of all its pixels, and writes nothing else. Called by who drives the convolution,
    /// outside of its tasks.
    pub make: &'a dyn Fn(Part),
}

/// A part of an image that is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Plane, of those of all images.
    pub plane: usize,
    /// First row, and where rows end.
    pub rows: [usize; 2],
    /// The same of pixels of each row.
    pub columns: [usize; 2],
    /// Where the first pixel of the first row goes. Channels and pixels follow each other.
    pub to: *mut u8,
    /// Elements from row to row there.
    pub row: usize,
}

impl Image<'_> {
    /// Makes what tiles read, if it is to be made: from row `done` on, as those before are made, or read by no tile.
    pub(super) fn prepare(&self, conv: &Conv, grid: &Grid, first: usize, tiles: usize, done: &mut usize) {
        let Some(Made { ring, make }) = self.made else { return };
        let height = conv.input[1];
        let [from, end] = grid.rows_of(conv, first, tiles);
        let mut at = from.max(*done);
        while at < end {
            let (stripe, y) = (at / height, at % height);
            let count = (end - at).min(height - y).min(ring.rows - at % ring.rows);
            make(Part {
                plane: stripe / grid.stripes,
                rows: [y, y + count],
                columns: grid.columns(conv, stripe % grid.stripes),
                to: self.ptr.wrapping_byte_add(at % ring.rows * ring.row * self.dtype.size_bytes()).cast_mut(),
                row: ring.row,
            });
            at += count;
        }
        *done = at.max(*done);
    }

    /// Where pixel 0 of row `y` of a plane of the input lies, for the tiles of a stripe, and elements from pixel to pixel.
    pub(super) fn line(
        &self,
        conv: &Conv,
        grid: &Grid,
        place: Place,
        [image, plane, y]: [usize; 3],
    ) -> (*const u8, isize) {
        let (elements, step) = match self.made {
            None => {
                let [images, planes, rows, pixels] = conv.strides;
                (image as isize * images + plane as isize * planes + y as isize * rows, pixels)
            }
            Some(Made { ring, .. }) => {
                let plane = image * conv.input[0] + plane;
                let row = (plane * grid.stripes + place.stripe) * conv.input[1] + y;
                let step = conv.in_channels as isize;
                let first = grid.columns(conv, place.stripe)[0] as isize;
                ((row % ring.rows * ring.row) as isize - first * step, step)
            }
        };
        (self.ptr.wrapping_byte_offset(elements * self.dtype.size_bytes() as isize), step)
    }
}
